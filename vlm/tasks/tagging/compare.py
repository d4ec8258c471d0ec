"""Selects what `vlm compare` compares of tagging evaluations."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.tasks.shared.stored import Compared, Sample


def select_tags(details: Any, predictions: Sequence[Mapping[str, Any]]) -> Compared:
    """Returns the tags of each sentence."""
    samples = {row["id"]: Sample((row["words"], row["tags"]), row["predicted"]) for row in predictions}
    return Compared({"": samples}, _score_tags)


def _score_tags(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.tasks.tagging.metrics import NAMES, find_scheme, tag_scorer  # torchmetrics takes long to import

    true = [tags for (_, tags), _ in samples]
    scheme = find_scheme({tag for tags in true for tag in tags})
    return NAMES, tag_scorer(true, [sample.predicted for sample in samples], scheme)
