"""What an evaluation has to show besides its metrics."""

import json
from collections.abc import Sequence
from pathlib import Path

from vlm.metrics.classification import ClassificationMetric


def write_classification(metric: ClassificationMetric, classes: Sequence[str], folder: Path) -> None:
    """Writes details.json, with the accuracy of each class and the confusions, and a picture of these."""
    from vlm.report.confusion import confusion_picture

    matrix = metric.confusion()
    details = {"accuracy": dict(zip(classes, metric.per_class(), strict=True)), "confusion": matrix.tolist()}
    (folder / "details.json").write_text(json.dumps(details, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    confusion_picture(matrix, classes, str(folder / "confusion.png"))
