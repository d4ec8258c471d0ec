"""`vlm evaluate --pairs`: a language model on minimal pairs."""

from pathlib import Path
from typing import Any

from vlm.errors import UserError, printable
from vlm.evaluation.minimal_pairs import Pair, pair_scores, read_pairs
from vlm.evaluation.report.evaluation import Evaluation
from vlm.evaluation.report.results import write_results
from vlm.evaluation.report.sections import Section, Table
from vlm.evaluation.report.verdict import TrainedModel, judged_metric, verdict_of
from vlm.inference.options import ModelOptions
from vlm.inference.predictor import load_predictor
from vlm.io.output import aligned
from vlm.io.terminal import PIPE_WIDTH, folded

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
