"""`vlm evaluate --pairs`: how often a language model scores the good sentence of a minimal pair higher."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlm.data.sources.tables import read_cells
from vlm.errors import UserError, print_error, printable
from vlm.evaluation.metrics.bootstrap import intervals, mean_scorer
from vlm.evaluation.report.content import Section, Table, TrainedModel, choose_metric, make_verdict
from vlm.evaluation.report.evaluation import Evaluation, write_results
from vlm.inference.options import ModelOptions
from vlm.inference.predictor import load_predictor
from vlm.io.output import align_columns
from vlm.io.terminal import PIPE_WIDTH, fold

# Columns of a table; BLiMP's names are accepted too.
COLUMNS = {"good": "good|sentence_good", "bad": "bad|sentence_bad", "kind": "kind|UID"}


class Pair(NamedTuple):
    """A minimal pair: a good and a bad sentence, and the kind of their difference."""

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
                raise UserError(f"{path}, {cells.position}: needs two different sentences, good and bad")
            pairs.append(pair)
    except UserError as fault:
        message, remedy, _ = str(fault).partition("; set data.source.")  # which --pairs does not have
        raise UserError(f"{message}; name them good and bad" if remedy else message) from fault
    for note in notes:
        print_error(note.partition("; data.source.")[0].partition("; if so, set data.source.")[0], "note")
    if not pairs:
        raise UserError(f"{path}: contains no pairs; use a table with the columns good and bad")
    return pairs


def score_pairs(pairs: Sequence[Pair], margins: Sequence[float], *, seed: int = 0) -> dict[str, dict[str, float]]:
    """Returns the share of pairs whose good sentence is more likely, with its interval, overall and by kind.

    Args:
        margins: Log-probability of the good sentence minus that of the bad one, in nats; 0 counts as wrong.
    Returns:
        Scores named accuracy, accuracy@low, accuracy@high and pairs, by kind; those of all pairs under "".
    """
    correct = (np.array(margins) > 0).astype(np.float64)
    kinds = np.array([pair.kind for pair in pairs])
    masks = {"": np.ones(len(pairs), bool)} | {str(kind): kinds == kind for kind in dict.fromkeys(kinds) if kind}
    scores = {}
    for kind, mask in masks.items():
        chosen = correct[mask]
        bounds = intervals(["accuracy"], mean_scorer(chosen[:, None]), len(chosen), seed=seed)
        scores[kind] = {"accuracy": float(chosen.mean()), **bounds, "pairs": len(chosen)}
    return scores


BATCH_SIZE = 32  # sentences
TABLE_HEADER = ["pairs", "number", "accuracy", "low", "high"]


def evaluate_pairs(
    checkpoint: str, path: str, folder: Path | None, *, device: str, batch_size: int | None, trust: str | None
) -> int:
    """Prints how often a model scores the good sentence of a pair higher, and writes a report if a folder is given.

    Raises:
        UserError: The checkpoint is not a language model, or the table is invalid.
    """
    pairs = read_pairs(Path(path))
    model = ModelOptions(checkpoint=checkpoint, device=device, precision="fp32", trust=trust)
    predictor: Any = model.load(load_predictor)
    if predictor.task != "language_modeling":
        raise UserError(f"{checkpoint}: is a model for {predictor.task}; --pairs needs a language model")
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    logprobs = predictor.logprobs(texts, batch_size=batch_size or BATCH_SIZE)
    rows: list[dict[str, Any]] = [
        {**pair._asdict(), "good_logprob": good, "bad_logprob": bad, "right": good > bad}
        for pair, good, bad in zip(pairs, logprobs[::2], logprobs[1::2], strict=True)
    ]
    scores = score_pairs(pairs, [row["good_logprob"] - row["bad_logprob"] for row in rows])
    table = [
        [
            printable(kind) or "all",
            f"{int(score['pairs']):,}",
            *(f"{score[name]:.4f}" for name in ("accuracy", "accuracy@low", "accuracy@high")),
        ]
        for kind, score in scores.items()
    ]
    print(f"{align_columns([TABLE_HEADER, *table])}\n")
    results = scores[""] | {"accuracy@chance": 0.5}
    verdict = make_verdict(
        choose_metric(results, ["accuracy"]),
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
            sections=[Section("Kinds", [Table(TABLE_HEADER, table)])],
            headlines=("accuracy",),
            verdict=verdict,
        )
        write_results(folder, evaluation, picture=lambda name: None)
        print(f"report      {folder / 'report.html'}")
    print(fold("\n".join(verdict.lines()), pipe_width=PIPE_WIDTH))
    return 0
