"""Selects what `vlm compare` compares of evaluations of questions about texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlm.evaluation.metrics.bootstrap import Scorer, mean_scorer
from vlm.tasks.shared.stored import Compared, Sample


def select_span_answers(details: Mapping[str, Any], predictions: Any) -> Compared:
    """Returns the scores of each question's answer."""
    rows = details.get("questions", ())
    samples = {row["id"]: Sample(row.get("answers"), (row["exact_match"], row["f1"])) for row in rows}
    return Compared({"": samples}, _score_answers)


def _score_answers(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    return ("exact_match", "f1"), mean_scorer(np.array([sample.predicted for sample in samples], np.float64))
