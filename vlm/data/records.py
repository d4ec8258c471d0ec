"""Records: the samples of a data set, its splits, and the interface of a source.

A source (a folder, a table, shards, generated scenes) has splits. A split has a length, `fresh`, and
`record(index, epoch)`. A record depends on these arguments only, so that every worker creates the same one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from PIL import Image

from vlm.errors import UserError

NAMES = ("train", "val", "test")
# fmt: off
SPLITS = {  # accepted names of splits
    "train": "train", "training": "train", "restval": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}
# fmt: on

MAX_INVALID = 0.01  # maximum share of invalid rows of a file; more stop a run, as unreadable images do
NAMED_ROWS = 10  # maximum number of reasons that an error lists for invalid rows

_collected: ContextVar[list[str] | None] = ContextVar("collect_errors", default=None)

T = TypeVar("T")
S = TypeVar("S")


@contextmanager
def collect_errors() -> Iterator[list[str]]:
    """Context in which a data set is read to the end in spite of errors that stop training; yields their messages."""
    errors: list[str] = []
    token = _collected.set(errors)
    try:
        yield errors
    finally:
        _collected.reset(token)


def report_error(message: str) -> None:
    """Raises a UserError, or adds its message to the list inside `collect_errors`, once."""
    error, errors = UserError(message), _collected.get()
    if errors is None:
        raise error
    if str(error) not in errors:
        errors.append(str(error))


class SkipMessage(str):
    """A message about a part of a data set that is skipped, with the kind of problem.

    Args:
        line: The message.
        kind: "empty caption", "no image", "missing image", "no caption", "two splits", "invalid row", or a kind of text
            sources.
    """

    kind: str

    def __new__(cls, line: str, kind: str) -> Self:
        self = super().__new__(cls, line)
        self.kind = kind
        return self


def error_summary(skipped: Sequence[str]) -> str:
    """The number of problems and the first one, in parentheses, for an error message; empty if there are none."""
    return f" ({len(skipped)} problem{'s' * (len(skipped) > 1)}; the first: {skipped[0]})" if skipped else ""


class RowError(ValueError):
    """A row of a file is invalid; the message is the reason without the file and the position."""


class RowChecker:
    """Reads the rows of a file. Invalid ones are skipped and named, up to MAX_INVALID of all rows.

    Args:
        path: The file.
        source: The source that reads it: its `rows` are counted, and its `skipped` rows are listed.
    """

    def __init__(self, path: Path, source: "Source") -> None:
        self.path, self.source = path, source
        self.rows = 0
        self._invalid: list[tuple[str, str]] = []  # position and reason

    def reject(self, where: str, reason: str | RowError) -> None:
        """Skips an invalid row at this position in the file."""
        self.rows += 1
        self._invalid.append((where, str(reason)))

    def read(self, rows: Iterable[tuple[str, T]], convert: Callable[[T], Iterable[S]]) -> Iterator[S]:
        """Yields what `convert` returns for each row, skipping rows for which it raises RowError.

        Args:
            rows: Rows with their positions; rows that could not be parsed were rejected.
            convert: Converts a row.
        Raises:
            UserError: More than MAX_INVALID of the rows are invalid.
        """
        for where, row in rows:
            try:
                converted = list(convert(row))
            except RowError as error:
                self.reject(where, error)
                continue
            self.rows += 1
            yield from converted
        lines = (SkipMessage(f"{self.path}, {where}: {reason}", "invalid row") for where, reason in self._invalid)
        self.source.skipped = [*self.source.skipped, *lines]
        self.source.rows += self.rows
        count = len(self._invalid)
        if count > MAX_INVALID * self.rows:
            positions: dict[str, list[str]] = {}
            for where, reason in self._invalid:
                positions.setdefault(reason, []).append(where)
            reasons = []
            for reason, (first, *later) in positions.items():
                further = f" and {len(later) - 2:,} more" if len(later) > 2 else ""
                also = f" (also {', '.join(later[:2])}{further})" if later else ""
                reasons.append(f"{first}: {reason}{also}")
            more = [f"and {len(reasons) - NAMED_ROWS:,} more reasons"] if len(reasons) > NAMED_ROWS else []
            report_error(
                f"{self.path}: {count:,} of {self.rows:,} rows {'is' if count == 1 else 'are'} invalid, more than the "
                f"{MAX_INVALID:.0%} that may be skipped; correct or remove them:\n"
                + "; ".join([*reasons[:NAMED_ROWS], *more])
            )


class Question(NamedTuple):
    """A question about an image, its answer, and the kind of question.

    Args:
        answers: All correct answers, if there are several.
        before: Earlier turns of its conversation, as pairs of role (system, user or assistant) and text.
        image_places: For each turn up to the question, the places of images in its text, as numbers of characters
            before them; empty if all images come before the first user turn.
    """

    text: str
    answer: str
    kind: str = ""
    answers: tuple[str, ...] = ()
    before: tuple[tuple[str, str], ...] = ()
    image_places: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        """The question followed by its answer."""
        return f"{self.text} {self.answer}".strip()

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """The conversation up to the answer."""
        return (*self.before, ("user", self.text), ("assistant", self.answer))

    def accepts(self, answer: str) -> bool:
        """Returns True if an answer equals a correct one."""
        return answer == self.answer or answer in self.answers


def select_last_questions(questions: Sequence[Question]) -> list[Question]:
    """The last question of each conversation; its `turns` are the entire conversation."""
    continued = {question.before for question in questions}
    return [question for question in questions if question.turns not in continued]


def select_turns(questions: Sequence[Question], last: Sequence[Question]) -> list[Question]:
    """The questions of some conversations.

    Args:
        last: The last question of each conversation.
    """
    chosen = [question.turns for question in last]
    return [
        question for question in questions if any(turns[: len(question.turns)] == question.turns for turns in chosen)
    ]


class Preference(NamedTuple):
    """A prompt with an answer that people prefer and one that they reject.

    Args:
        prompt: The turns up to the answers, as pairs of role (system, user or assistant) and text; empty if the answers
            are captions of an image.
        chosen, rejected: The answers.
        image_places: For each turn of the prompt, the places of images in its text; see `Question`.
    """

    prompt: tuple[tuple[str, str], ...]
    chosen: str
    rejected: str
    image_places: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        """The last turn of the prompt and both answers."""
        question = f"{self.prompt[-1][1]} " if self.prompt else ""
        return f"{question}{self.chosen} (rejected: {self.rejected})"

    @property
    def texts(self) -> list[str]:
        """All texts: those of the prompt's turns, the chosen answer and the rejected one."""
        return [*(text for _, text in self.prompt), self.chosen, self.rejected]


@dataclass(slots=True)
class Record:
    """One sample: its id and its values. The image is opened only on demand.

    Args:
        id: Unique id within the source.
        values: Values by name: "captions" to train on, "references" (all captions), "questions", "pairs" of answers,
            "label", "document", or whatever a source and a field agree on.
        open_image: Opens the image, in RGB; raises ImageError if it cannot be read.
        read_file: Returns the bytes of the image file; None if there is no file.
        read_stamp: Returns a string that changes when the image (or document) changes, without reading it; None if
            there is none.
        open_more: Opens each further image of a record with several, in order.
        read_sizes: Reads width and height of each image without decoding it; None if only decoding tells.
    """

    id: str
    values: Mapping[str, Any] = field(default_factory=dict)
    open_image: Callable[[], Image.Image] | None = None
    read_file: Callable[[], bytes] | None = None
    read_stamp: Callable[[], str] | None = None
    open_more: Sequence[Callable[[], Image.Image]] = ()
    read_sizes: Callable[[], list[tuple[int, int]]] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.values or (name == "image" and self.open_image is not None)

    def __getitem__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise UserError(f"data: {self.id} has no {name}; use data that has it, or another task") from None

    def image(self) -> Image.Image:
        """The image in RGB.

        Raises:
            ImageError: The image cannot be read.
            UserError: The record has no image.
        """
        if self.open_image is None:
            raise UserError(f"data: {self.id} has no image; use data that has one, or another task")
        return self.open_image()

    def images(self) -> list[Image.Image]:
        """All images in RGB, in order; raises the same errors as `image`."""
        return [self.image(), *(open_image() for open_image in self.open_more)]

    def image_sizes(self) -> list[tuple[int, int]]:
        """Width and height of each image, in order; empty for a record without images.

        Raises:
            ImageError: An image cannot be read.
        """
        if self.open_image is None:
            return []
        return [image.size for image in self.images()] if self.read_sizes is None else self.read_sizes()

    @property
    def texts(self) -> list[str]:
        """Texts of the record for display: captions, questions, boxes, pairs of answers, translations, or the class."""
        if "references" in self.values:
            return list(self.values["references"])
        if "questions" in self.values:
            return [f"{question.text} {question.answer}" for question in self.values["questions"]]
        if "boxes" in self.values:
            return list(map(str, self.values["boxes"].boxes))
        if "pairs" in self.values:
            return [str(pair) for pair in self.values["pairs"]]
        if "translation" in self.values:
            return [self.values["text"], self.values["translation"]]
        return [str(self.values["class"])] if "class" in self.values else []


class Split:
    """Samples by index. A fresh split has new samples in every epoch; other splits ignore the epoch."""

    fresh = False

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} does not implement __len__")

    def record(self, index: int, epoch: int = 0) -> Record:
        """The sample with this index."""
        raise TypeError(f"{type(self).__name__} does not implement record")

    def records(self, limit: int | None = None) -> Iterator[Record]:
        """All samples of epoch 0 in order, or the first `limit`."""
        size = len(self)
        return (self.record(index) for index in range(size if limit is None else min(limit, size)))


class ListSplit(Split, Generic[T]):
    """A split over a list of items.

    Args:
        items: What samples are read from.
        read: Creates the record of an item in an epoch.
    """

    def __init__(self, items: Sequence[T], read: Callable[[T, int], Record]) -> None:
        self.items, self.read = items, read

    def __len__(self) -> int:
        return len(self.items)

    def record(self, index: int, epoch: int = 0) -> Record:
        return self.read(self.items[index], epoch)


class SplitSubset(Split):
    """A subset of a split by index, with the samples of epoch 0 in every epoch."""

    def __init__(self, split: Split, indices: Sequence[int]) -> None:
        self.split, self.indices = split, indices

    def __len__(self) -> int:
        return len(self.indices)

    def record(self, index: int, epoch: int = 0) -> Record:
        return self.split.record(self.indices[index])


class SplitView(Split):
    """Base of views of a split that change its records."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)


BLOCK = 512  # maximum number of samples in a block within which pairs are formed


def find_block(index: int, size: int) -> range:
    """The block of a sample: a split is cut into equal blocks of at most BLOCK samples."""
    blocks = -(-size // BLOCK)
    number = ((index + 1) * blocks - 1) // size
    return range(number * size // blocks, (number + 1) * size // blocks)


def find_partner(index: int, size: int) -> int:
    """The sample half a block away, because neighbours may be similar. Each sample is the partner of exactly one."""
    block = find_block(index, size)
    return block[(index - block.start + len(block) // 2) % len(block)]


class PairedSplit(SplitView):
    """A split whose records also have their "index", their "partner", and its index ("partner_index")."""

    def record(self, index: int, epoch: int = 0) -> Record:
        record, partner_index = self.split.record(index, epoch), find_partner(index, len(self))
        added = {"index": index, "partner_index": partner_index, "partner": self.split.record(partner_index, epoch)}
        record.values = {**record.values, **added}
        return record


class LanguageSplit(SplitView):
    """A split whose records have captions in one language only; a record may have none."""

    def __init__(self, split: Split, language: str) -> None:
        super().__init__(split)
        self.language = language

    def record(self, index: int, epoch: int = 0) -> Record:
        record = self.split.record(index, epoch)
        pairs = zip(record["captions"], record["languages"], strict=True)
        record.values = {**record.values, "captions": [text for text, language in pairs if language == self.language]}
        return record


class Source:
    """A data set: its splits of records, and messages about parts that are not used.

    A subclass sets `splits` and defines `open`.

    Attributes:
        holds: Names of the values of its records, as a class attribute, so that a task can be checked before data are
            read.
        needs_one_of: Arguments of which one must be given, as a class attribute.
        name: Name of the data set in reports.
        splits: Names of non-empty splits, out of ``train``, ``val`` and ``test`` in this order.
        classes: Names of the labels; empty if records have no label.
        languages: Languages of the captions; empty if unknown.
        skipped: A message for each thing that is not used because of a problem.
        notes: A message for each choice that was made in reading its files, such as the quoting of a table.
        rows: Number of rows of its files, invalid ones included; 0 if it does not read rows.
        repeated: A message for each repeated caption of an image, which is used once.
        is_synthetic: Whether a program generates the images, so that simple ones are naturally near duplicates.
        has_turns: Whether its questions may be turns of conversations, which refer to earlier turns.
    """

    holds: ClassVar[tuple[str, ...]] = ()
    needs_one_of: ClassVar[tuple[str, ...]] = ()
    name: str = ""
    splits: tuple[str, ...] = ()
    classes: Sequence[str] = ()
    languages: Sequence[str] = ()
    skipped: Sequence[str] = ()
    rows: int = 0
    repeated: Sequence[str] = ()
    notes: Sequence[str] = ()
    is_synthetic: bool = False
    has_turns: bool = False

    def split(self, name: str) -> Split:
        """The split with this name.

        Raises:
            UserError: There is no such split.
        """
        if name not in self.splits:
            raise UserError(f"data: unknown split {name!r}; choose one of {', '.join(self.splits)}")
        return self.open(name)

    def open(self, name: str) -> Split:
        """Opens a split listed in `splits`."""
        raise TypeError(f"{type(self).__name__} does not implement open")

    def word_probabilities(self, words: Sequence[str | None]) -> Sequence[Mapping[str, float]] | None:
        """Probabilities of words in each gap of a text, if a known grammar generates the texts."""
        return None

    def find_uncaptioned_images(self) -> list[str]:
        """Image files in the same folders that no caption refers to."""
        return []

    def check_archives(self) -> tuple[list[str], int]:
        """A message per damaged archive file, and the number of archive files; may read all of them."""
        return [], 0
