"""Records: the samples of a data set, its splits, and the interface of a source.

A source (a folder, a table, shards, scenes that are drawn) has splits. A split has a length, `fresh`, and
`record(index, epoch)`. A record is a function of its keys alone, so that any worker makes the same one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

from PIL import Image

from vlm.errors import UserError

NAMES = ("train", "val", "test")
# fmt: off
SPLITS = {  # the names that splits go by
    "train": "train", "training": "train", "restval": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}
# fmt: on

_lenient: ContextVar[bool] = ContextVar("lenient", default=False)


@contextmanager
def lenient() -> Iterator[None]:
    """Sources that are made within it go on after faults that would spoil a run, to find all of them at once."""
    token = _lenient.set(True)
    try:
        yield
    finally:
        _lenient.reset(token)


def is_lenient() -> bool:
    """True while all faults are being looked for, within `lenient`."""
    return _lenient.get()


class Skipped(str):
    """A line that names what of a data set is not used and says why, with the kind of its fault.

    Args:
        line: The line.
        kind: "empty caption", "no image", "no caption" or "two splits".
    """

    kind: str

    def __new__(cls, line: str, kind: str) -> Self:
        self = super().__new__(cls, line)
        self.kind = kind
        return self


def first_fault(skipped: Sequence[str]) -> str:
    """The words of a message on too few samples that name the first of the faults, if there are any."""
    return f" ({len(skipped)} faults; the first: {skipped[0]})" if skipped else ""


class Question(NamedTuple):
    """A question about an image, its answer, and what kind of question it is."""

    text: str
    answer: str
    kind: str = ""

    def __str__(self) -> str:
        """The question and its answer, as they are read one after the other."""
        return f"{self.text} {self.answer}".strip()


@dataclass(slots=True)
class Record:
    """One sample: its name and all that is known of it. Its image is opened only when it is asked for.

    Args:
        id: Name that no other sample of the source has.
        known: Values at hand, by name: "captions" that a row is trained on, "references" (all captions), "questions",
            "label", "document", or whatever else a source and a field agree on.
        open_image: Opens the image, in RGB; raises ImageError for one that cannot be read.
        read_file: The bytes of the image's file; None where no file holds it.
        read_stamp: A text that changes where the image (or document) does, without its being read; None for none.
        open_more: Opens each further image of a record that holds several, in order.
    """

    id: str
    known: Mapping[str, Any] = field(default_factory=dict)
    open_image: Callable[[], Image.Image] | None = None
    read_file: Callable[[], bytes] | None = None
    read_stamp: Callable[[], str] | None = None
    open_more: Sequence[Callable[[], Image.Image]] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.known or (name == "image" and self.open_image is not None)

    def __getitem__(self, name: str) -> Any:
        try:
            return self.known[name]
        except KeyError:
            raise UserError(f"data: {self.id} has no {name}; give data that do, or another task") from None

    def image(self) -> Image.Image:
        """The image in RGB.

        Raises:
            ImageError: It cannot be read.
            UserError: The record has none.
        """
        if self.open_image is None:
            raise UserError(f"data: {self.id} has no image; give data that do, or another task")
        return self.open_image()

    def images(self) -> list[Image.Image]:
        """All images in RGB, in order; raises as `image` does."""
        return [self.image(), *(open_image() for open_image in self.open_more)]

    @property
    def texts(self) -> list[str]:
        """Texts beside its image, for a person: captions, questions, a text and its translation, or its class."""
        if "references" in self.known:
            return list(self.known["references"])
        if "questions" in self.known:
            return [f"{question.text} {question.answer}" for question in self.known["questions"]]
        if "translation" in self.known:
            return [self.known["text"], self.known["translation"]]
        return [str(self.known["class"])] if "class" in self.known else []


class Split:
    """Samples by index. A fresh split has other samples in every epoch; all others ignore the epoch's number."""

    fresh = False

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} has no length")

    def record(self, index: int, epoch: int = 0) -> Record:
        """The sample of these keys."""
        raise TypeError(f"{type(self).__name__} has no records")

    def records(self, limit: int | None = None) -> Iterator[Record]:
        """All samples of epoch 0 in order, or the first so many."""
        size = len(self)
        return (self.record(index) for index in range(size if limit is None else min(limit, size)))


class Listed(Split):
    """A split whose samples stand in a list.

    Args:
        items: Whatever a sample is read from.
        read: Makes the record of an item in an epoch.
    """

    def __init__(self, items: Sequence[Any], read: Callable[[Any, int], Record]) -> None:
        self.items, self.read = items, read

    def __len__(self) -> int:
        return len(self.items)

    def record(self, index: int, epoch: int = 0) -> Record:
        return self.read(self.items[index], epoch)


class Part(Split):
    """Some samples of a split by index, those of epoch 0 in every epoch."""

    def __init__(self, split: Split, indices: Sequence[int]) -> None:
        self.split, self.indices = split, indices

    def __len__(self) -> int:
        return len(self.indices)

    def record(self, index: int, epoch: int = 0) -> Record:
        return self.split.record(self.indices[index])


class InLanguage(Split):
    """A split whose records have their captions in one language alone, of which there may be none."""

    def __init__(self, split: Split, language: str) -> None:
        self.split, self.language = split, language

    def __len__(self) -> int:
        return len(self.split)

    def record(self, index: int, epoch: int = 0) -> Record:
        record = self.split.record(index, epoch)
        pairs = zip(record["captions"], record["languages"], strict=True)
        record.known = {**record.known, "captions": [text for text, own in pairs if own == self.language]}
        return record


class Source:
    """A data set: splits of records, and what was left out of them.

    A subclass sets `splits` and defines `open`.

    Attributes:
        holds: Names of what its records hold, stated by the class, so that a task can be refused before data are read.
        name: What the data set is called in a report.
        splits: Names of the splits that hold a sample, of ``train``, ``val`` and ``test`` in this order.
        classes: Names of the labels; none where records have no label.
        languages: Languages of the captions, whose own each record says; none where nobody says them.
        skipped: A line for each thing that is not used because of a fault.
        repeated: A line for each caption that an image has twice, of which one is used.
        drawn: Whether a program draws the images, whose simplest ones are nearly the same by nature.
    """

    holds: ClassVar[tuple[str, ...]] = ()
    name: str = ""
    splits: tuple[str, ...] = ()
    classes: Sequence[str] = ()
    languages: Sequence[str] = ()
    skipped: Sequence[str] = ()
    repeated: Sequence[str] = ()
    drawn: bool = False

    def split(self, name: str) -> Split:
        """The split of this name.

        Raises:
            UserError: There is no such split.
        """
        if name not in self.splits:
            raise UserError(f"data: there is no split {name!r}; there are {', '.join(self.splits)}")
        return self.open(name)

    def open(self, name: str) -> Split:
        """The split of a name that is in `splits`."""
        raise TypeError(f"{type(self).__name__} opens no split")

    def chances(self, words: Sequence[str | None]) -> Sequence[Mapping[str, float]] | None:
        """The chance of each word in each gap of a text, where a known grammar writes the texts."""
        return None

    def uncaptioned(self) -> list[str]:
        """The image files that no caption names, beside those that are named."""
        return []

    def damaged(self) -> tuple[list[str], int]:
        """A line for each damaged file of many samples, and how many such files there are; may read all of them."""
        return [], 0
