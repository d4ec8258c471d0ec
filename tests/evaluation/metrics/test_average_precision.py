"""Average precision equals pycocotools'; resampled images count as often as they are drawn."""

import json

import numpy as np
import pytest
from generated_boxes import FILE, RESULTS, coco_scores, generate

from vlm.data.boxes import ImageBoxes, LabeledBox
from vlm.evaluation.metrics.average_precision import compute_ious, match_classes, precision_scorer

EXPECTED = json.loads(FILE.read_text())
PLAIN = 20  # results in any run of the tests


def scores(truths, detections) -> list[float]:
    return precision_scorer(match_classes(truths, detections))(np.ones((1, len(truths))))[0].tolist()


def test_average_precision_equals_that_of_pycocotools() -> None:
    for seed in range(PLAIN):
        assert scores(*generate(seed)) == pytest.approx(EXPECTED[seed], abs=1e-11), seed


@pytest.mark.slow
def test_average_precision_equals_that_of_pycocotools_on_a_thousand_results() -> None:
    assert len(EXPECTED) == RESULTS == 1000
    for seed in range(PLAIN, RESULTS):
        assert scores(*generate(seed)) == pytest.approx(EXPECTED[seed], abs=1e-11), seed


@pytest.mark.slow
def test_the_stored_scores_are_those_of_the_installed_pycocotools() -> None:
    pytest.importorskip("pycocotools")
    for seed in range(RESULTS):
        truths, detections = generate(seed)
        assert scores(truths, detections) == pytest.approx(coco_scores(truths, detections), abs=1e-11), seed


def test_resampled_images_count_as_often_as_they_are_drawn() -> None:
    truths, detections = generate(5, images=12)
    distinct = [[(item, score + number * 1e-9) for item, score in found] for number, found in enumerate(detections)]
    draws = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), size=6).astype(float)
    scored = precision_scorer(match_classes(truths, distinct))(draws)
    for row, counts in zip(scored, draws.astype(int), strict=True):
        chosen = [image for image, count in enumerate(counts) for _ in range(count)]
        repeated = scores([truths[image] for image in chosen], [distinct[image] for image in chosen])
        # Copies of a detection are counted at once, and those of the list one after another.
        assert row == pytest.approx(repeated, abs=0.03) and row[2] == pytest.approx(repeated[2])


def test_perfect_detections_no_detections_and_no_objects() -> None:
    truths, _ = generate(3)
    perfect = [[(item._replace(crowd=False), 0.5) for item in truth.boxes if not item.crowd] for truth in truths]
    assert scores(truths, perfect) == pytest.approx([1, 1, 1])
    assert scores(truths, [[] for _ in truths]) == [0, 0, 0]
    empty = [ImageBoxes((9, 9), ())]
    assert scores(empty, [[(LabeledBox("cat", (0.0, 0.0, 1.0, 1.0)), 0.5)]]) == [0, 0, 0]


def test_the_overlap_with_a_crowd_is_the_share_of_the_detection() -> None:
    detections, objects = np.array([[0.0, 0, 2, 2], [5, 5, 6, 6]]), np.array([[1.0, 0, 3, 2], [0, 0, 100, 100]])
    assert compute_ious(detections, objects, np.array([False, True])).tolist() == [[1 / 3, 1], [0, 1]]
