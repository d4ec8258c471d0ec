"""Generated objects and detections, and what pycocotools says of them: `python tests/helpers/generated_boxes.py`.

It needs pycocotools, and writes the scores of 1,000 generated results for the tests, which do not.
"""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np

from vlm.data.boxes import ImageBoxes, LabeledBox
from vlm.evaluation.metrics.average_precision import Scored

FILE = Path(__file__).parents[1] / "evaluation" / "metrics" / "coco_eval.json"
CLASSES = ["bird", "cat", "dog", "fish"]  # the last is detected, but is in no image
RESULTS = 1000


def generate(seed: int, images: int = 8) -> tuple[list[ImageBoxes], list[Scored]]:
    """Objects, crowds among them, and detections that are near, double, of another class or wrong; scores recur."""
    rng = np.random.default_rng(seed)
    truths, detections = [], []
    for _ in range(images):
        boxes, found = [], []
        for _ in range(rng.integers(0, 7)):
            left, top, width, height = (float(side) for side in (*rng.integers(0, 70, 2), *rng.integers(4, 30, 2)))
            box = left, top, left + width, top + height
            boxes.append(LabeledBox(CLASSES[rng.integers(3)], box, bool(rng.random() < 0.15)))
        for item in boxes:
            for _ in range(rng.integers(0, 3)):
                left, top, right, bottom = (float(edge) for edge in item.box + np.round(rng.normal(0, 2, 4)))
                label = item.label if rng.random() < 0.8 else CLASSES[rng.integers(4)]
                if left < right and top < bottom:
                    found.append((LabeledBox(label, (left, top, right, bottom)), float(np.round(rng.random(), 1))))
        for _ in range(rng.integers(0, 3)):
            left, top, width, height = (float(side) for side in (*rng.integers(0, 70, 2), *rng.integers(4, 30, 2)))
            wrong = LabeledBox(CLASSES[rng.integers(4)], (left, top, left + width, top + height))
            found.append((wrong, float(np.round(rng.random(), 1))))
        truths.append(ImageBoxes((100, 100), tuple(boxes)))
        detections.append(found)
    return truths, detections


def coco_scores(truths: list[ImageBoxes], detections: list[Scored]) -> list[float]:
    """AP, AP50 and recall by pycocotools."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def entry(image: int, item: LabeledBox) -> dict:
        left, top, right, bottom = item.box
        box, area = [left, top, right - left, bottom - top], (right - left) * (bottom - top)
        return {"image_id": image, "category_id": 1 + CLASSES.index(item.label), "bbox": box, "area": area}

    annotations, results = [], []
    for image, (truth, found) in enumerate(zip(truths, detections, strict=True), 1):
        for item in truth.boxes:
            annotations.append(entry(image, item) | {"id": len(annotations) + 1, "iscrowd": int(item.crowd)})
        results += [entry(image, item) | {"score": score} for item, score in found]
    with redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {"images": [{"id": image} for image in range(1, len(truths) + 1)], "annotations": annotations}
        coco.dataset["categories"] = [{"id": id, "name": name} for id, name in enumerate(CLASSES, 1)]
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [float(evaluation.stats[at]) for at in (0, 1, 8)]


if __name__ == "__main__":
    scores = [coco_scores(*generate(seed)) for seed in range(RESULTS)]
    rows = ",\n".join(json.dumps([round(score, 12) for score in row]) for row in scores)
    FILE.write_text(f"[\n{rows}\n]\n")
