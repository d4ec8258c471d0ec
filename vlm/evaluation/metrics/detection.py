"""The metric of detection: COCO's average precision, recall, and images whose classes are all right."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from vlm.data.boxes import ImageBoxes, LabeledBox
from vlm.errors import UserError
from vlm.evaluation.metrics.average_precision import NAMES, Scored, compute_ious, match_classes, precision_scorer
from vlm.evaluation.metrics.bootstrap import Scorer, column_scorer, intervals, mean_scorer
from vlm.evaluation.metrics.records import RecordMetric

CONTROLS = ("shuffled", "blank")  # objects of another image, and of a blank one
EXACT = "exact_classes"


class ScoredImage(NamedTuple):
    """An image with its objects and those that a model found.

    Args:
        id: Id of the image.
        truth: Its objects.
        found: Detections with their scores.
        unparsed: Number of objects that the model wrote and that have no valid box or no class.
    """

    id: str
    truth: ImageBoxes
    found: Scored
    unparsed: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the classes found are those of the image, each as often."""
        return sorted(item.label for item, _ in self.found) == true_classes(self.truth)


def true_classes(truth: ImageBoxes) -> list[str]:
    """The classes of an image's objects, sorted, one for each object; without crowds."""
    return sorted(item.label for item in truth.boxes if not item.crowd)


def overlap_score(truth: Sequence[LabeledBox], found: Sequence[LabeledBox], invalid: int = 0) -> float:
    """Returns the F1 score of one image's objects in which a match counts by its intersection over union.

    It is 2 * sum of the matches' IoU / (number of true objects + number written), and 1 if there are neither. Objects
    of one class are matched greedily, the pair of the highest IoU first.

    Args:
        truth: The true objects, without crowds.
        found: The valid objects that a model wrote.
        invalid: Number of invalid ones.
    """
    written = len(found) + invalid
    if not truth and not written:
        return 1.0
    total = 0.0
    for label in {item.label for item in truth} & {item.label for item in found}:
        sides = ([item.box for item in side if item.label == label] for side in (found, truth))
        boxes, objects = (np.array(side, dtype=float) for side in sides)
        ious = compute_ious(boxes, objects, np.zeros(len(objects), dtype=bool))
        for _ in range(min(ious.shape)):
            row, column = np.unravel_index(ious.argmax(), ious.shape)
            total += float(ious[row, column])
            ious[row], ious[:, column] = 0.0, 0.0
    return 2 * total / (len(truth) + written)


class DetectionMetric(RecordMetric):
    """Average precision, recall, and the share of images with exactly the right classes.

    Attributes:
        images: The images of the last `compute`, sorted by id.
    """

    images: list[ScoredImage]
    _constant_classes: Sequence[str]

    def update(self, images: Iterable[ScoredImage], column: str = "predicted") -> None:
        """Adds images.

        Args:
            column: "predicted", or one of ``CONTROLS``.
        """
        self.add(
            (
                f"{image.id}#{column}",
                column,
                image.id,
                image.truth,
                [[*item, score] for item, score in image.found],
                image.unparsed,
            )
            for image in images
        )

    def compute(self) -> dict[str, float]:
        """Returns ``ap``, ``ap50``, ``recall``, ``exact_classes``, and ``unparsed``, a share of the objects written.

        Raises:
            UserError: Nothing was added.
        """
        self._columns = defaultdict(list)
        for column, id, truth, found, unparsed in self.rows().values():
            scored = [(LabeledBox(label, tuple(box), crowd), score) for label, box, crowd, score in found]
            self._columns[column].append(ScoredImage(id, ImageBoxes.of_plain(truth), scored, unparsed))
        self.images = self._columns["predicted"]
        if not self.images:
            raise UserError("no image to score: none could be read, or the split is empty", status=1)
        lost, kept = sum(image.unparsed for image in self.images), sum(len(image.found) for image in self.images)
        return {**self._scores(self.images), "unparsed": lost / max(1, lost + kept)}

    def controls(self, train: Iterable[ImageBoxes]) -> dict[str, float]:
        """Returns metric@constant, which is the same for all images, metric@shuffled and metric@blank.

        The constant detections are a box for each class, whose edges are the mean ones in train and whose score is the
        share of training images with the class. Constant classes are the most frequent ones of a training image.
        """
        constant, classes = constant_detections(train)
        self._columns["constant"] = [
            image._replace(found=scale_detections(constant, image.truth.size)) for image in self.images
        ]
        results: dict[str, float] = {}
        for control in ("constant", *CONTROLS):
            if images := self._columns.get(control):
                scores = self._scores(images)
                if control == "constant":
                    scores[EXACT] = fmean(true_classes(image.truth) == classes for image in images)
                    self._constant_classes = classes
                results |= {f"{name}@{control}": value for name, value in scores.items()}
        return results

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns ap@low and ap@high and those of the other scores: 95% intervals by bootstrap over images."""
        return intervals(NAMES, self._scorer(self.images), len(self.images), seed=seed)

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of a metric of the model and of a control, and the number of images of both."""
        controlled = {image.id: image for image in self._columns[control]}
        images = [image for image in self.images if image.id in controlled]
        sides = images, [controlled[image.id] for image in images]
        if metric == EXACT:
            exact = [[image.is_exact for image in side] for side in sides]
            if control == "constant":
                exact[1] = [true_classes(image.truth) == self._constant_classes for image in images]
            model, baseline = (mean_scorer(np.array(flags, dtype=float)[:, None]) for flags in exact)
            return model, baseline, len(images)
        at = NAMES.index(metric)
        model, baseline = (column_scorer(self._scorer(side), at) for side in sides)
        return model, baseline, len(images)

    def _scores(self, images: Sequence[ScoredImage]) -> dict[str, float]:
        values = self._scorer(images)(np.ones((1, len(images))))[0].tolist()
        return {**dict(zip(NAMES, values, strict=True)), EXACT: fmean(image.is_exact for image in images)}

    @staticmethod
    def _scorer(images: Sequence[ScoredImage]) -> Scorer:
        return precision_scorer(match_classes([image.truth for image in images], [image.found for image in images]))

    def _start(self) -> None:
        super()._start()
        self.images, self._columns = [], defaultdict[str, list[ScoredImage]](list)
        self._constant_classes = []


def constant_detections(train: Iterable[ImageBoxes]) -> tuple[list[tuple[LabeledBox, float]], list[str]]:
    """The best detections that are the same for all images, with edges as shares of the sides; and the best classes."""
    edges: defaultdict[str, list[list[float]]] = defaultdict(list)
    images: Counter[str] = Counter()
    sets: Counter[tuple[str, ...]] = Counter()
    for truth in train:
        labels = true_classes(truth)
        images.update({*labels})
        sets[tuple(labels)] += 1
        for item in truth.boxes:
            if not item.crowd:
                edges[item.label].append([edge / truth.size[at % 2] for at, edge in enumerate(item.box)])
    found: list[tuple[LabeledBox, float]] = []
    for label, rows in sorted(edges.items()):
        box: Any = tuple(np.mean(rows, 0).tolist())
        found.append((LabeledBox(label, box), images[label] / sets.total()))
    most = min(sets, key=lambda labels: (-sets[labels], labels), default=())
    return found, list(most)


def scale_detections(found: Scored, size: tuple[int, int]) -> list[tuple[LabeledBox, float]]:
    """Detections whose edges are shares of the sides, in pixels of an image of this width and height."""
    scaled = []
    for item, score in found:
        box: Any = tuple(edge * size[at % 2] for at, edge in enumerate(item.box))
        scaled.append((item._replace(box=box), score))
    return scaled
