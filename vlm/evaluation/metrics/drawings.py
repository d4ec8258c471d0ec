"""The metric of pictures drawn from captions: how often judges find the caption in the picture."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from vlm.errors import UserError
from vlm.evaluation.metrics.bootstrap import Scorer, intervals, mean_scorer
from vlm.evaluation.metrics.records import RecordMetric

DRAWN, SHUFFLED = "drawn", "shuffled"
CEILING = "ceiling"  # the sample's own image, encoded and decoded by the codebook
RANDOM = "random"  # a training image, drawn at random


class JudgedPicture(NamedTuple):
    """A picture of a caption.

    Args:
        id: Id of the sample.
        caption: The caption.
        references: All captions of the sample.
        found: The captions that each judge finds in the picture, the likeliest first, by name of the metric.
    """

    id: str
    caption: str
    references: Sequence[str]
    found: Mapping[str, Sequence[str]]

    def matches(self, judge: str) -> bool:
        """Whether a judge finds the caption in the picture."""
        return self.caption in self.found[judge]


class DrawingMetric(RecordMetric):
    """The share of pictures in which each judge finds their caption, with controls.

    Attributes:
        pictures: The drawn pictures of the last `compute`, sorted by id.
    """

    pictures: list[JudgedPicture]

    def update(self, pictures: Iterable[JudgedPicture], column: str = DRAWN) -> None:
        """Adds pictures.

        Args:
            column: ``DRAWN``, ``CEILING`` or ``RANDOM``.
        """
        self.add(
            (f"{picture.id}#{column}", column, picture.id, picture.caption, picture.references, picture.found)
            for picture in pictures
        )

    def compute(self) -> dict[str, float]:
        """Returns the share of drawn pictures in which each judge finds their caption.

        Raises:
            UserError: Nothing was added.
        """
        self._columns = defaultdict(list)
        for column, *picture in self.rows().values():
            self._columns[column].append(JudgedPicture(*picture))
        self.pictures = self._columns[DRAWN]
        if not self.pictures:
            raise UserError("no picture to judge: the split is empty", status=1)
        return self._scores(self.pictures)

    @property
    def judges(self) -> list[str]:
        """The names of the judges' metrics."""
        return list(self.pictures[0].found) if self.pictures else []

    def controls(self) -> dict[str, float]:
        """Returns metric@shuffled, of the picture of another caption; metric@random and metric@ceiling."""
        following = [*self.pictures[1:], *self.pictures[:1]]
        pairs = zip(self.pictures, following, strict=True)
        self._columns[SHUFFLED] = [picture._replace(found=other.found) for picture, other in pairs]
        if len(self.pictures) < 2:  # a lone picture is that of no other caption
            del self._columns[SHUFFLED]
        results: dict[str, float] = {}
        for control in (SHUFFLED, RANDOM, CEILING):
            if pictures := self._columns.get(control):
                results |= {f"{name}@{control}": value for name, value in self._scores(pictures).items()}
        return results

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns metric@low and metric@high of each judge: 95% intervals by bootstrap over pictures."""
        return intervals(self.judges, mean_scorer(self._flags(self.pictures)), len(self.pictures), seed=seed)

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of a metric of the model and of a control, and the number of pictures of both."""
        controlled = {picture.id: picture for picture in self._columns[control]}
        pictures = [picture for picture in self.pictures if picture.id in controlled]
        sides = pictures, [controlled[picture.id] for picture in pictures]
        place = self.judges.index(metric)
        model, baseline = (mean_scorer(self._flags(side)[:, [place]]) for side in sides)
        return model, baseline, len(pictures)

    def _flags(self, pictures: Sequence[JudgedPicture]) -> np.ndarray:
        """Whether each judge finds the caption of each picture: (N, judges)."""
        return np.array([[picture.matches(judge) for judge in self.judges] for picture in pictures], dtype=float)

    def _scores(self, pictures: Sequence[JudgedPicture]) -> dict[str, float]:
        return {judge: fmean(picture.matches(judge) for picture in pictures) for judge in self.judges}

    def _start(self) -> None:
        super()._start()
        self.pictures, self._columns = [], defaultdict[str, list[JudgedPicture]](list)

    def details(self) -> dict[str, Any]:
        """The drawn pictures by id, in plain containers."""
        return {
            picture.id: {
                "caption": picture.caption,
                "references": list(picture.references),
                "found": {judge: list(found) for judge, found in picture.found.items()},
                "matches": {judge: picture.matches(judge) for judge in picture.found},
            }
            for picture in self.pictures
        }
