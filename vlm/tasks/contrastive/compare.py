"""Selects what `vlm compare` compares of contrastive evaluations."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlm.evaluation.metrics.bootstrap import Scorer, mean_scorer
from vlm.tasks.shared.stored import Compared, Sample


def select_ranks(details: Any, predictions: Sequence[Mapping[str, Any]]) -> Compared:
    """Returns the rank of each image's own text."""
    return Compared({"": {row["image_id"]: Sample(None, row["rank"]) for row in predictions}}, _score_ranks)


def _score_ranks(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.tasks.contrastive.metrics import DEPTHS  # torchmetrics takes long to import

    hits = np.array([[sample.predicted <= depth for depth in DEPTHS] for sample in samples], np.float64)
    return [f"text_recall_{depth}" for depth in DEPTHS], mean_scorer(hits)
