"""Selects what `vlm compare` compares of translation evaluations, with or without photos."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.tasks.shared.stored import Compared, Sample


def select_translations(details: Mapping[str, Any], predictions: Any) -> Compared:
    """Returns the translations."""
    texts = details.get("texts", {})
    samples = {name: Sample(row["reference"], row["translation"]) for name, row in texts.items()}
    return Compared({"": samples}, _score_translations)


def _score_translations(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.evaluation.metrics.texts import NAMES, TextScores  # sacreBLEU takes long to import

    true, predicted = zip(*samples, strict=True)
    return NAMES, TextScores(predicted, true).score
