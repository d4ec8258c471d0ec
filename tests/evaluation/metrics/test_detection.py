"""The metric of detection: exact classes, unparsed objects, controls, intervals, and samples of all processes."""

import numpy as np
import pytest

from vlm.data.boxes import ImageBoxes, LabeledBox
from vlm.errors import UserError
from vlm.evaluation.metrics.detection import DetectionMetric, ScoredImage, constant_detections, overlap_score

CAT, DOG = LabeledBox("cat", (0.0, 0.0, 10.0, 10.0)), LabeledBox("dog", (10.0, 0.0, 20.0, 10.0))
CROWD = LabeledBox("bird", (0.0, 0.0, 20.0, 20.0), True)


def truth(*boxes: LabeledBox) -> ImageBoxes:
    return ImageBoxes((20, 20), boxes)


def image(id: str, true: ImageBoxes, *found: LabeledBox, unparsed: int = 0) -> ScoredImage:
    return ScoredImage(id, true, [(item, 0.9 - 0.1 * at) for at, item in enumerate(found)], unparsed)


def make_metric(*more: ScoredImage) -> DetectionMetric:
    metric = DetectionMetric()
    metric.update([image("b", truth(CAT, DOG, CROWD), CAT, DOG), image("a", truth(CAT), DOG, unparsed=1), *more])
    return metric


def test_exact_classes_and_unparsed_objects() -> None:
    metric = make_metric(image("c", truth(CAT, CAT), CAT))
    results = metric.compute()
    assert [item.id for item in metric.images] == ["a", "b", "c"]
    assert results["exact_classes"] == pytest.approx(1 / 3)  # a crowd is not expected, and two are not one
    assert results["unparsed"] == pytest.approx(1 / 5)
    assert 0 < results["ap"] <= results["ap50"] < 1 and results["recall"] == pytest.approx((2 / 4 + 1) / 2)
    with pytest.raises(UserError, match="no image to score"):
        DetectionMetric().compute()


def test_images_in_another_order_and_twice_score_the_same() -> None:
    metric, other = make_metric(), DetectionMetric()
    other.update([image("a", truth(CAT), DOG, unparsed=1)])
    other.update([image("b", truth(CAT, DOG, CROWD), CAT, DOG)])
    other.update([image("a", truth(CAT), DOG, unparsed=1)])
    assert other.compute() == metric.compute()


def test_controls() -> None:
    metric = make_metric()
    metric.update([image("a", truth(CAT)), image("b", truth(CAT, DOG, CROWD))], "blank")
    metric.update([image("b", truth(CAT, DOG, CROWD), DOG), image("a", truth(CAT), CAT)], "shuffled")
    metric.compute()
    shifted = CAT._replace(box=(2.0, 0.0, 12.0, 10.0))
    train = [truth(CAT), truth(shifted), truth(CAT, DOG), truth(CROWD), ImageBoxes((40, 40), ())]
    results = metric.controls(train)
    assert results["ap@blank"] == results["exact_classes@blank"] == 0
    assert results["exact_classes@shuffled"] == 0.5 and 0 < results["ap@shuffled"] < 1
    assert results["exact_classes@constant"] == 0  # the most frequent classes are none: two images are empty
    found, classes = constant_detections(train)
    assert [(item.label, score) for item, score in found] == [("cat", 3 / 5), ("dog", 1 / 5)] and classes == []
    assert found[0][0].box == pytest.approx((2 / 3 / 20, 0, (2 / 3 + 10) / 20, 0.5))  # shares of the sides
    for name, control in (("ap", "shuffled"), ("recall", "constant"), ("exact_classes", "blank")):
        model, baseline, count = metric.scorers(name, control)
        everything = np.ones((1, count))
        assert model(everything)[0, 0] == pytest.approx(metric.compute()[name]) if control != "constant" else True
        assert baseline(everything)[0, 0] == pytest.approx(results[f"{name}@{control}"])


def test_intervals_hold_the_scores() -> None:
    metric = make_metric(*(image(str(n), truth(CAT, DOG), *[CAT, DOG][: 1 + n % 2]) for n in range(30)))
    results, ends = metric.compute(), metric.intervals(seed=0)
    assert all(ends[f"{name}@low"] <= results[name] <= ends[f"{name}@high"] for name in ("ap", "ap50", "recall"))
    assert ends["recall@low"] < ends["recall@high"]


def test_the_overlap_of_objects_counts_missing_wrong_and_invalid_ones() -> None:
    half = LabeledBox("cat", (0.0, 0.0, 5.0, 10.0))
    near = LabeledBox("cat", (1.0, 0.0, 10.0, 10.0))
    assert overlap_score([CAT, DOG], [DOG, CAT]) == 1.0
    assert overlap_score([], []) == 1.0 and overlap_score([], [CAT]) == overlap_score([CAT], []) == 0.0
    assert overlap_score([CAT, DOG], [CAT]) == pytest.approx(2 / 3)
    assert overlap_score([CAT], [half]) == pytest.approx(0.5)
    assert overlap_score([CAT], [half], invalid=2) == pytest.approx(2 * 0.5 / 4)
    assert overlap_score([CAT], [half, near]) == pytest.approx(2 * 0.9 / 3)  # one object matches once
    assert overlap_score([CAT, half], [near, half]) == pytest.approx(2 * (1 + 0.9) / 4)  # the best pair first
    assert overlap_score([CAT], [LabeledBox("dog", CAT.box)]) == 0.0
