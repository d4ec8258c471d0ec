"""Selects what `vlm compare` compares of evaluations of masked words."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlm.evaluation.metrics.bootstrap import Scorer, ratio_scorer
from vlm.tasks.shared.stored import Compared, Sample


def select_masked_words(details: Any, predictions: Sequence[Mapping[str, Any]]) -> Compared:
    """Returns the tokens of each text's gaps, which differ between models with different tokenizers."""
    rows = [row for row in predictions if "true" in row]  # earlier versions did not store the true tokens
    return Compared(
        {"": {row["id"]: Sample(row["text"], (row["true"], row["predicted"])) for row in rows}}, _score_masked_words
    )


def _score_masked_words(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    hits = [[one == other for one, other in zip(*sample.predicted, strict=True)] for sample in samples]
    return ("accuracy",), ratio_scorer(np.array([[sum(hit), len(hit)] for hit in hits], np.float64))
