"""`vlm evaluate --pairs`: a language model should find the right one of two similar sentences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlm.data.sources.tables import read_cells
from vlm.errors import UserError, print_error, printable
from vlm.evaluation.metrics.bootstrap import intervals
from vlm.evaluation.report.evaluation import Evaluation, write_results
from vlm.evaluation.report.sections import Section, Table
from vlm.evaluation.report.verdict import TrainedModel, judged_metric, verdict_of
from vlm.inference.options import ModelOptions
from vlm.inference.predictor import load_predictor
from vlm.io.output import aligned
from vlm.io.terminal import PIPE_WIDTH, folded

# Columns of a table; BLiMP's names are accepted too.
COLUMNS = {"good": "good|sentence_good", "bad": "bad|sentence_bad", "kind": "kind|UID"}


class Pair(NamedTuple):
    """Two sentences, and the kind of their difference."""

    good: str
    bad: str
    kind: str = ""


def read_pairs(path: Path) -> list[Pair]:
    """Reads the pairs of a table with the columns good, bad and, optionally, kind.

    Raises:
        UserError: The table cannot be read or is empty, or a sentence is missing, or both are equal.
    """
    pairs: list[Pair] = []
    notes: list[str] = []
    try:
        for cells in read_cells(path, COLUMNS, optional=["kind"], notes=notes):
            pair = Pair(*(str(cells.values.get(name) or "").strip() for name in COLUMNS))
            if not pair.good or not pair.bad or pair.good == pair.bad:
                raise UserError(f"{path}, {cells.where}: needs two sentences that differ, good and bad")
            pairs.append(pair)
    except UserError as fault:
        said, columns, _ = str(fault).partition("; set data.source.")
        raise UserError(f"{said}; name them good and bad" if columns else said) from fault
    for note in notes:
        print_error(note.partition("; data.source.")[0].partition("; if so, set data.source.")[0], "note")
    if not pairs:
        raise UserError(f"{path}: holds no pair; give a table with the columns good and bad")
    return pairs


def pair_scores(pairs: Sequence[Pair], margins: Sequence[float], *, seed: int = 0) -> dict[str, dict[str, float]]:
    """Returns the share of pairs whose good sentence is likelier, with its interval, overall and by kind.

    Args:
        margins: Log-probability of the good sentence minus that of the bad one, in nats; 0 counts as wrong.
    Returns:
        Scores named accuracy, accuracy@low, accuracy@high and pairs, by kind; those of all pairs under "".
    """
    right = np.array(margins) > 0
    kinds = np.array([pair.kind for pair in pairs])
    chosen = {"": np.ones(len(pairs), bool)} | {str(kind): kinds == kind for kind in dict.fromkeys(kinds) if kind}
    return {kind: _share(right[rows].astype(np.float64), seed) for kind, rows in chosen.items()}


def _share(right: np.ndarray, seed: int) -> dict[str, float]:
    bounds = intervals(["accuracy"], lambda draws: (draws @ right / len(right))[:, None], len(right), seed=seed)
    return {"accuracy": float(right.mean()), **bounds, "pairs": len(right)}


BATCH = 32  # sentences
HEADER = ["pairs", "number", "accuracy", "low", "high"]


def evaluate_pairs(
    checkpoint: str, path: str, folder: Path | None, *, device: str, batch_size: int | None, trust: str | None
) -> int:
    """Prints how often a model finds the good sentence of a pair likelier; writes it to a folder too.

    Raises:
        UserError: The checkpoint holds no language model, or the table is at fault.
    """
    pairs = read_pairs(Path(path))
    model = ModelOptions(checkpoint=checkpoint, device=device, precision="fp32", trust=trust)
    predictor: Any = model.load(load_predictor)
    if predictor.task != "language_modeling":
        raise UserError(f"{checkpoint}: holds a model for {predictor.task}; --pairs needs a language model")
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    logprobs = predictor.logprobs(texts, batch_size=batch_size or BATCH)
    rows = [
        _row(pair, *both) for pair, both in zip(pairs, zip(logprobs[::2], logprobs[1::2], strict=True), strict=True)
    ]
    scores = pair_scores(pairs, [row["good_logprob"] - row["bad_logprob"] for row in rows])
    table = [[printable(kind) or "all", *_cells(score)] for kind, score in scores.items()]
    print(f"{aligned([HEADER, *table])}\n")
    results = scores[""] | {"accuracy@chance": 0.5}
    verdict = verdict_of(
        judged_metric(results, ["accuracy"]),
        paired=None,
        bounds=(results["accuracy@low"], results["accuracy@high"]),
        samples=f"{len(pairs):,} pairs",
        count=len(pairs),
        trained=TrainedModel(),
        remedies=(),
    )
    if folder is not None:
        evaluation = Evaluation(
            title=f"Minimal pairs: {Path(path).name}",
            task=predictor.task,
            split="pairs",
            used=len(pairs),
            results={f"pairs/{name}": value for name, value in results.items() if name != "pairs"},
            checkpoint=Path(model.checkpoint),
            predictions=rows,
            details={"kinds": scores},
            sections=[Section("Kinds", [Table(HEADER, table)])],
            headlines=("accuracy",),
            verdict=verdict,
        )
        write_results(folder, evaluation, picture=lambda name: None)
        print(f"report      {folder / 'report.html'}")
    print(folded("\n".join(verdict.lines()), pipe_width=PIPE_WIDTH))
    return 0


def _row(pair: Pair, good: float, bad: float) -> dict[str, Any]:
    return {**pair._asdict(), "good_logprob": good, "bad_logprob": bad, "right": good > bad}


def _cells(score: dict[str, float]) -> list[str]:
    values = (score[name] for name in ("accuracy", "accuracy@low", "accuracy@high"))
    return [f"{int(score['pairs']):,}", *(f"{value:.4f}" for value in values)]
