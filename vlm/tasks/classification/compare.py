"""Selects what `vlm compare` compares of evaluations of image or text classification."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlm.tasks.shared.stored import Compared, Sample, shares


def select_classes(details: Any, predictions: Sequence[Mapping[str, Any]]) -> Compared:
    """Returns the predicted classes."""
    samples = {row.get("image", row.get("id")): Sample([row["label"]], [row["predicted"]]) for row in predictions}
    return Compared({"": samples}, shares)
