"""Selects what `vlm compare` compares of evaluations of questions about images."""

from collections.abc import Mapping
from typing import Any

from vlm.tasks.shared.stored import Compared, Sample, shares


def select_image_answers(details: Mapping[str, Any], predictions: Any) -> Compared:
    """Returns the answers to all questions of an image as one sample, because they are correlated."""
    images: dict[str, tuple[list[str], list[str]]] = {}
    for row in details.get("questions", ()):
        true, predicted = images.setdefault(row["image_id"], ([], []))
        true.append(row["answer"])
        predicted.append(row["answer"] if row["predicted"] in row.get("answers", ()) else row["predicted"])
    return Compared({"": {image: Sample(*answers) for image, answers in images.items()}}, shares)
