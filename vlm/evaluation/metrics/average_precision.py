"""Average precision of boxes as COCO defines it, equal to pycocotools' COCOeval with all areas and 100 detections."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vlm.data.boxes import ImageBoxes, LabeledBox
from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.evaluation.metrics.ngrams import Floats

THRESHOLDS = np.linspace(0.5, 0.95, 10)  # of the intersection over union
RECALLS = np.linspace(0, 1, 101)  # recalls at which precision is averaged
MAX_DETECTIONS = 100  # of a class in an image
NAMES = ("ap", "ap50", "recall")
Scored = Sequence[tuple[LabeledBox, float]]  # detections of an image with their scores


class ClassMatches(NamedTuple):
    """The detections of a class in all images, most confident first, and how they match the class's objects.

    Shapes:
        images (D,): index of each detection's image; right, wrong bool (T, D): whether it matches an object, or none,
        at each threshold (a match with a crowd is neither); counts (N,): objects of each image, without crowds
    """

    images: np.ndarray
    right: np.ndarray
    wrong: np.ndarray
    counts: Floats


def compute_ious(detections: Floats, objects: Floats, crowd: np.ndarray) -> Floats:
    """Intersection over union of boxes; over the detection's area for a crowd. Shapes: (D, 4), (G, 4) -> (D, G)"""
    low = np.maximum(detections[:, None, :2], objects[None, :, :2])
    high = np.minimum(detections[:, None, 2:], objects[None, :, 2:])
    common = np.prod(np.clip(high - low, 0, None), -1)
    areas, object_areas = (np.prod(boxes[:, 2:] - boxes[:, :2], -1) for boxes in (detections, objects))
    union = np.where(crowd, areas[:, None], areas[:, None] + object_areas - common)
    return common / np.maximum(union, np.finfo(float).tiny)


def match_image(ious: Floats, crowd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matches detections with objects greedily, the most confident first; returns right and wrong, bool (T, D).

    Each detection takes the free object that it overlaps most, or a crowd if there is none.

    Args:
        ious: Of detections in order of confidence with objects, crowds last.
    Shapes:
        ious (D, G), crowd bool (G,)
    """
    matched = np.full((len(THRESHOLDS), len(ious)), -1)
    for row, threshold in enumerate(THRESHOLDS):
        free = np.ones(len(crowd), dtype=bool)
        for number, overlaps in enumerate(ious):
            for candidates in (free & ~crowd, crowd):
                able = np.flatnonzero(candidates & (overlaps >= min(threshold, 1 - 1e-10)))
                if len(able):  # of equal overlaps COCO takes the last
                    matched[row, number] = able[len(able) - 1 - overlaps[able][::-1].argmax()]
                    free[matched[row, number]] = False
                    break
    is_crowd = np.append(crowd, False)[matched]
    return (matched >= 0) & ~is_crowd, matched < 0


def match_classes(references: Sequence[ImageBoxes], detections: Sequence[Scored]) -> dict[str, ClassMatches]:
    """Matches the detections of images with their objects, by class; classes without objects have no precision."""
    found: defaultdict[str, list[tuple[int, float, np.ndarray, np.ndarray]]] = defaultdict(list)
    counts: defaultdict[str, Floats] = defaultdict(lambda: np.zeros(len(references)))
    for image, (truth, scored) in enumerate(zip(references, detections, strict=True)):
        by_class = _group(truth.boxes), _group_scored(scored)
        for label in {*by_class[0], *by_class[1]}:
            objects = sorted(by_class[0].get(label, ()), key=lambda item: item.crowd)
            best = sorted(by_class[1].get(label, ()), key=lambda item: -item[1])[:MAX_DETECTIONS]
            crowd = np.array([item.crowd for item in objects], dtype=bool)
            counts[label][image] += (~crowd).sum()
            boxes = np.array([item.box for item, _ in best], dtype=float).reshape(-1, 4)
            objects_boxes = np.array([item.box for item in objects], dtype=float).reshape(-1, 4)
            right, wrong = match_image(compute_ious(boxes, objects_boxes, crowd), crowd)
            found[label] += [(image, score, right[:, at], wrong[:, at]) for at, (_, score) in enumerate(best)]
    matches = {}
    for label in sorted(label for label, numbers in counts.items() if numbers.any()):
        rows = sorted(found[label], key=lambda row: -row[1])
        right, wrong = (np.array([row[at] for row in rows], bool).reshape(-1, len(THRESHOLDS)).T for at in (2, 3))
        matches[label] = ClassMatches(np.array([row[0] for row in rows], int), right, wrong, counts[label])
    return matches


def _group(boxes: Iterable[LabeledBox]) -> Mapping[str, list[LabeledBox]]:
    groups: defaultdict[str, list[LabeledBox]] = defaultdict(list)
    for item in boxes:
        groups[item.label].append(item)
    return groups


def _group_scored(boxes: Scored) -> Mapping[str, list[tuple[LabeledBox, float]]]:
    groups: defaultdict[str, list[tuple[LabeledBox, float]]] = defaultdict(list)
    for item, score in boxes:
        groups[item.label].append((item, score))
    return groups


def precision_scorer(matches: Mapping[str, ClassMatches]) -> Scorer:
    """NAMES of resampled images: precision averaged over recalls, thresholds and classes; AP at 0.5; mean recall."""

    def score(draws: Floats) -> Floats:
        sums, classes = np.zeros((len(draws), len(NAMES))), np.zeros((len(draws), 1))
        for item in matches.values():
            totals = draws @ item.counts  # (R,)
            sums += np.where(totals[:, None] > 0, _class_scores(item, draws, np.maximum(totals, 1)), 0)
            classes += totals[:, None] > 0
        return sums / np.maximum(classes, 1)

    return score


def _class_scores(item: ClassMatches, draws: Floats, totals: Floats) -> Floats:
    """NAMES of a class in resamples. Shapes: draws (R, N), totals (R,) -> (R, 3)"""
    if not len(item.images):
        return np.zeros((len(draws), len(NAMES)))
    weights = draws[:, item.images]  # (R, D)
    averages, recalls = [], []
    for flags in zip(item.right, item.wrong, strict=True):
        right, wrong = (np.cumsum(weights * flag, axis=1) for flag in flags)
        recall, precision = right / totals[:, None], right / (right + wrong + np.spacing(1))
        precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[
            :, ::-1
        ]  # the best at this recall or a higher one
        reached = np.searchsorted(RECALLS, recall, side="right")  # number of recalls reached after each detection
        new = np.diff(reached, prepend=0, axis=1)
        averages.append((precision * new).sum(1) / len(RECALLS))
        recalls.append(recall[:, -1])
    return np.stack([np.mean(averages, 0), averages[0], np.mean(recalls, 0)], axis=1)
