"""Sections of an evaluation's report as plain values: a task states them, `report.evaluation` renders them."""

from collections.abc import Sequence
from dataclasses import dataclass

from vlm.randomness import numpy_rng

SHOWN = 8  # samples of a kind


@dataclass(frozen=True, kw_only=True)
class Card:
    """A sample with its image and a text.

    Args:
        image: Id of the sample whose image is shown.
        text: The main line.
        lines: Small lines below it.
        references: Texts that the main line is compared with.
    """

    image: str
    text: str
    lines: Sequence[str] = ()
    references: Sequence[str] = ()


@dataclass(frozen=True)
class Cards:
    """Images with texts, side by side."""

    cards: Sequence[Card]


@dataclass(frozen=True)
class Confusion:
    """A matrix of counts: how often each true class (rows) was taken for each class (columns)."""

    matrix: Sequence[Sequence[int]]
    classes: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Texts:
    """Texts with their lines as they are."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Note:
    """A small paragraph."""

    text: str


@dataclass(frozen=True)
class Pictures:
    """PNG files, each with a text for those who cannot see it."""

    pictures: Sequence[tuple[str, bytes]]


Part = Cards | Confusion | Table | Texts | Note | Pictures


@dataclass(frozen=True)
class Section:
    """Parts under a title."""

    title: str
    parts: Sequence[Part]


def random_places(count: int) -> list[int]:
    """A few places among so many, the same in every report of that many."""
    return numpy_rng("report", count).permutation(count)[:SHOWN].tolist()
