"""Text fields for encoders: a text or a pair of texts, words, and tags."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vlm.data.batch import IGNORE, InputRows, WordTags
from vlm.data.fields import AugmentKey, Field, TokenField
from vlm.data.records import Record, Source, Split
from vlm.data.text.inputs import Encoded, encode_text, encode_words, input_rows
from vlm.errors import UserError

REMEMBERED = 2**16  # size of the cache of encoded words


class EncodedField(TokenField):
    """Base of text fields for encoders.

    Args:
        others: See TokenField.
    Shapes:
        InputRows of tokens (B, L), segments (B, L)
    """

    cuts = False  # whether texts that are longer than a row are truncated

    def state(self) -> dict[str, Any]:
        return super().state() | {"max_len": self.max_len}

    def pieces(self, word: str) -> list[int]:
        """Token ids of a word, cached."""
        if word not in self._ids:
            if len(self._ids) >= REMEMBERED:
                self._ids.clear()
            self._ids[word] = self.tokenizer.encode(word)
        return self._ids[word]

    def collate(self, values: Sequence[Encoded]) -> InputRows:
        return input_rows(values, self.tokenizer.pad_id)

    def length(self, record: Record) -> int:
        return sum(len(row.ids) for row in self.encode(record, ()).rows)


class InputField(EncodedField):
    """The text of a record, or its pair of texts; long texts are truncated."""

    needs = ("text",)
    cuts = True
    pairs = False

    def prepare(self) -> None:
        self.pairs = "pair" in self._train.record(0)

    def state(self) -> dict[str, Any]:
        return super().state() | {"pairs": self.pairs}

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.pairs = bool(about["pairs"])

    def texts_of(self, record: Record) -> Sequence[str]:
        return [record[name] for name in ("text", "pair") if name in record]

    def encode(self, record: Record, key: AugmentKey | None) -> Encoded:
        texts = self.texts_of(record)
        return Encoded([encode_text(self.tokenizer, self.max_len, *texts)], texts if key is None else ())


class WordsField(EncodedField):
    """The words of a record and the index of each word's first token; long records are split into rows."""

    needs = ("words",)

    def texts_of(self, record: Record) -> Sequence[str]:
        return ["".join(f" {word}" for word in record["words"])]

    def encode(self, record: Record, key: AugmentKey | None) -> Encoded:
        words = record["words"]
        return Encoded(encode_words(self.tokenizer, self.max_len, words, self.pieces), words if key is None else ())


class TagField(Field):
    """The tags of a record's words, as WordTags; tags that training does not have get no label."""

    needs = ("tags",)
    classes: Sequence[str] = ()

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        self.splits = splits

    def prepare(self) -> None:
        self._take(sorted({tag for record in self.splits["train"].records() for tag in record["tags"]}))

    def _take(self, classes: Iterable[str]) -> None:
        self.classes = list(classes)
        self._labels = {tag: label for label, tag in enumerate(self.classes)}

    def state(self) -> dict[str, Any]:
        return {"classes": self.classes}

    def restore(self, about: Mapping[str, Any]) -> None:
        """Restores the tags of a checkpoint.

        Raises:
            UserError: None of them occurs in the data.
        """
        self._take(about["classes"])
        first = self.splits[next(iter(self.splits))].record(0)["tags"]
        if not set(first) & set(self.classes):
            raise UserError(f"data: the checkpoint has no tag {first[0]!r}, only {', '.join(self.classes[:8])}")

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_classes": len(self.classes)}

    def identity(self, record: Record) -> Sequence[str]:
        return record["tags"]

    def encode(self, record: Record, key: AugmentKey | None) -> Sequence[str]:
        return record["tags"]

    def collate(self, values: Sequence[Sequence[str]]) -> WordTags:
        labels = [self._labels.get(tag, IGNORE) for tags in values for tag in tags]
        known = sum(label != IGNORE for label in labels)
        return WordTags(torch.tensor(labels, dtype=torch.long), known, values)
