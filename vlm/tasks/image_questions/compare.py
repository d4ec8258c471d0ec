"""What two evaluations of questions about images are compared by."""

from collections.abc import Mapping
from typing import Any

from vlm.tasks.shared.stored import Compared, Sample, shares


def compared(details: Mapping[str, Any], predictions: Any) -> Compared:
    """The answers to all questions of an image, as one sample: they are alike."""
    images: dict[str, tuple[list[str], list[str]]] = {}
    for row in details.get("questions", ()):
        true, predicted = images.setdefault(row["image_id"], ([], []))
        true.append(row["answer"])
        predicted.append(row["answer"] if row["predicted"] in row.get("answers", ()) else row["predicted"])
    return Compared({"": {image: Sample(*answers) for image, answers in images.items()}}, shares)
