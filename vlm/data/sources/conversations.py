"""Your own conversations about images."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm.data.records import Question, Record, RowChecker, RowError
from vlm.data.sources.caption_source import CaptionedImage, CaptionSource
from vlm.data.sources.caption_tables import Row
from vlm.data.sources.captions import root_of, table_files
from vlm.data.sources.tables import Cells, read_table
from vlm.errors import Count, Share

IMAGE = "<image>"  # marks an image in the words of a turn
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SAID_BY = (("from", "value"), ("role", "content"))  # keys of a turn's role and text
SEPARATOR = "\0"  # between the names of several images


class Conversation(tuple[Question, ...]):
    """The questions of a conversation, each with the turns before it."""

    def __str__(self) -> str:
        return " ".join(words for _, words in self[-1].turns)


class Conversations(CaptionSource):
    """Conversations about images: JSON lines, a JSON array, or Parquet, with one conversation a row.

    Turns are {"from": "human" or "gpt", "value": ...} (LLaVA), {"role": "user", "assistant" or "system",
    "content": ...}, or pairs {"user": ..., "assistant": ...} (the Cauldron). Images come before the first turn,
    regardless of where their marks <image> are; there is a mark per image, or none. All conversations about the same
    images form one record.

    Args:
        image_column: Name of the column of images, or several separated by ``|``; a cell has one image or a list.
        conversation_column: The same for the column of turns.
        kind_column: Name of the column of kinds of conversation, which are also scored separately; null for none.
        conversations_per_image: Maximum number of conversations per image in an epoch of ``train``; None for all.
        others: See Captions.
    Raises:
        UserError: A file is missing, or more than 1% of its rows are invalid or name missing images.
    """

    holds = ("image", "questions")
    text = "conversation"
    empty = "no answer in the conversation"
    turns = True
    name = "conversations"
    separator = SEPARATOR

    def __init__(
        self,
        *,
        path: str,
        root: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        image_column: str = "images|image",
        conversation_column: str = "conversations|messages|texts",
        kind_column: str | None = None,
        split_column: str = "split",
        val_fraction: Share = 0.05,
        test_fraction: Share = 0.05,
        seed: int = 0,
        conversations_per_image: Count | None = None,
    ) -> None:
        root = root_of(root, path)
        super().__init__(root=root, seed=seed, captions_per_image=conversations_per_image, column=image_column)
        names = {"image": image_column, "conversation": conversation_column, "split": split_column}
        names |= {} if kind_column is None else {"kind": kind_column}
        self._columns = {f"{name}_column": column for name, column in names.items()}
        files = table_files(self.root, path, val_path, test_path)
        for split, file in files.items():
            self._add(self._rows(file), file, split=split if len(files) > 1 else None)
        self._finish(files["train"], val_fraction, test_fraction)

    def _rows(self, path: Path) -> Iterator[Row]:
        return read_table(RowChecker(path, self), self._columns, self._row, optional=["image_column"])

    def _row(self, cells: Cells) -> Iterator[Row]:
        images = cells.values.get("image_column") or []
        images = images if isinstance(images, list) else [images]
        kind = cells.values.get("kind_column", "")
        if not all(isinstance(value, str) for value in (*images, kind)):
            raise RowError("images and kinds must be text")
        name = SEPARATOR.join(map(str.strip, images))
        self._mention(name)
        said = turns(cells.values["conversation_column"])
        marks = sum(words.count(IMAGE) for role, words in said if role == "user")  # an answer may be about the mark
        if images and marks not in (0, len(images)):  # a row without an image is skipped as such
            raise RowError(f"its turns have {marks} {IMAGE} for {len(images)} images")
        conversation = questions([(role, words.replace(IMAGE, "").strip()) for role, words in said], kind)
        yield Row(name, conversation, cells.split, cells.where)

    def _record(self, most: int | None, image: CaptionedImage, epoch: int) -> Record:
        record = super()._record(most, image, epoch)
        record.known = {"questions": [question for several in record["captions"] for question in several]}
        return record


def turns(content: Any) -> list[tuple[str, str]]:
    """Reads the turns of a conversation, in any of the three forms, as pairs of role and text with marks <image>.

    Raises:
        RowError: It has another form.
    """
    if not isinstance(content, list) or not all(isinstance(turn, Mapping) for turn in content):
        raise RowError("the conversation is not a list of turns")
    return [(role, _join_parts(words)) for turn in content for role, words in _said(turn)]


def _said(turn: Mapping[str, Any]) -> list[tuple[str, Any]]:
    for role, words in SAID_BY:
        if role in turn and words in turn:
            if not isinstance(turn[role], str) or turn[role] not in ROLES:
                raise RowError(f"a turn is by {str(turn[role])!r:.40}; roles are {', '.join(ROLES)}")
            return [(ROLES[turn[role]], turn[words])]
    if not {"user", "assistant"} <= turn.keys():
        raise RowError("a turn has neither from and value, nor role and content, nor user and assistant")
    return [("user", turn["user"]), ("assistant", turn["assistant"])]


def _join_parts(content: Any) -> str:
    """The text of a turn, which may consist of parts: {"type": "text", "text": ...} or {"type": "image", ...}."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("the words of a turn are not text")
    texts = []
    for part in content:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (part, None)
        if kind in ("image", "image_url") and not text:
            texts.append(IMAGE)
        elif kind in ("text", None) and isinstance(text, str):
            texts.append(text)
        else:
            raise RowError(f"a turn has a part {str(kind)!r:.40}; parts are text and image")
    return " ".join(texts)


def questions(said: Sequence[tuple[str, str]], kind: str = "") -> Conversation:
    """The questions of a conversation, each with the turns before it; empty if nothing is answered.

    Raises:
        RowError: An answer has no question before it.
    """
    asked: list[Question] = []
    before: list[tuple[str, str]] = []
    for role, words in said:
        if role == "assistant" and words:
            if not before or before[-1][0] != "user":
                raise RowError("an answer has no question before it")
            asked.append(Question(before[-1][1], words, kind, before=tuple(before[:-1])))
        if words:
            before.append((role, words))
    return Conversation(asked)
