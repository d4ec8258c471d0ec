"""Sections of an evaluation's report as plain values: tasks create them, `report.evaluation` renders them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from vlm.randomness import numpy_rng

T = TypeVar("T")
MAX_SAMPLES = 8  # samples of a kind in a section


class Finding(NamedTuple):
    """A diagnosed problem of a model and suggested fixes, best first."""

    fault: str
    remedies: Sequence[str]

    def lines(self) -> list[str]:
        return [self.fault, *(f"  {number}. {remedy}" for number, remedy in enumerate(self.remedies, 1))]


@dataclass(frozen=True, kw_only=True)
class Card:
    """A sample with its image and texts.

    Args:
        image: Id of the sample whose image is shown.
        text: Main text.
        lines: Small lines below it.
        references: Texts to compare the main text with.
    """

    image: str
    text: str
    lines: Sequence[str] = ()
    references: Sequence[str] = ()


@dataclass(frozen=True)
class Cards:
    """Cards in a grid."""

    cards: Sequence[Card]


@dataclass(frozen=True, eq=False)
class Confusion:
    """A confusion matrix: counts by true class (rows) and predicted class (columns)."""

    matrix: Sequence[Sequence[int]]
    classes: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Texts:
    """Preformatted texts."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Note:
    """A small paragraph."""

    text: str


@dataclass(frozen=True)
class Pictures:
    """PNG files, each with alternative text."""

    pictures: Sequence[tuple[str, bytes]]


Part = Cards | Confusion | Table | Texts | Note | Pictures


@dataclass(frozen=True)
class Section:
    """Parts under a title."""

    title: str
    parts: Sequence[Part]


def pick_samples(samples: Sequence[T]) -> list[T]:
    """Returns random samples, the same ones in every report."""
    order = numpy_rng("report", len(samples)).permutation(len(samples))
    return [samples[place] for place in order[:MAX_SAMPLES].tolist()]
