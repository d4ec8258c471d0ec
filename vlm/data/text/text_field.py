"""The field of a language model: documents, encoded once, read as windows of tokens."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from vlm.data.batch import TextRows
from vlm.data.fields import AugmentKey, TokenField
from vlm.data.records import Record, Source, Split
from vlm.data.text.documents import Document
from vlm.data.text.token_file import TokenFile, open_tokens
from vlm.data.text.tokenizer import Tokenizer
from vlm.data.text.windows import RandomWindows, SlidingWindows, Window, Windows
from vlm.errors import Count, UserError
from vlm.randomness import numpy_rng

LEARNED_FROM = 2**26  # bytes of text, about, that are enough to learn a tokenizer from


class Counts(NamedTuple):
    """Divisors of a loss over a whole split: scored tokens (all but each document's first), bytes, words."""

    tokens: int
    bytes: int
    words: int


class TextField(TokenField):
    """Documents as windows of tokens, each a token longer than what a model reads: the last one is only predicted.

    The documents of a split are encoded once into a file that is mapped into memory.

    Args:
        tokenizer: Learned from the training split unless it already is.
        max_len: Tokens that a model reads at once.
        stride: Tokens that the window of an evaluation moves on by: fewer give each more context and take longer; None
            for half of max_len.
    Shapes:
        TextRows of tokens (B, L+1), segments (B, L+1), or None where each row is of a single document
    Raises:
        UserError: A number is out of range.
    """

    needs = ("document",)
    reads_whole = True

    def __init__(self, *, tokenizer: Tokenizer, max_len: Count, stride: Count | None = None) -> None:
        super().__init__(tokenizer=tokenizer, max_len=max_len)
        self.stride = max(1, max_len // 2) if stride is None else stride
        self._files: dict[str, TokenFile] = {}
        if not 1 <= self.stride <= max_len:
            raise UserError(f"data.stride: {self.stride} skips tokens; give 1 to data.max_len, which is {max_len}")

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        self._splits, self._seed, self._cache = splits, seed, cache
        self._scratch = TemporaryDirectory(prefix="vlm-tokens-") if cache is None else None

    def texts(self) -> Iterator[str]:
        documents = list(self._documents("train"))
        step = max(1, sum(document.size() for document in documents) // LEARNED_FROM)
        return islice(chain.from_iterable(document.lines() for document in documents), 0, None, step)

    def prepare(self) -> None:
        """Encodes all splits, so that a fault shows at once."""
        for name in self._splits:
            self.tokens(name)
        self.view("train", self._splits["train"], training=True)

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self._files.clear()

    def fingerprint(self, record: Record) -> Sequence[str]:
        window: Window = record["window"]
        header = window.windows.file.header
        return header.digest, str(header.tokens), header.tokenizer

    def tokens(self, name: str) -> TokenFile:
        """The token ids of a split, from the cache where they are.

        Raises:
            UserError: Its text cannot be read or its tokens written, or it holds no text.
        """
        if name not in self._files:
            documents = list(self._documents(name))
            digest = blake2b(f"{name} {self.tokenizer.fingerprint}".encode(), digest_size=16)
            for record in self._splits[name].records():
                stamp = record.read_stamp() if record.read_stamp else ""
                digest.update(f"\0{record.id}\0{stamp}".encode(errors="surrogateescape"))
            folder = Path(self._cache or self._scratch.name)  # type: ignore[union-attr]
            size = sum(document.size() for document in documents)
            lines = (document.lines() for document in documents)
            file = open_tokens(folder / f"{name}-{digest.hexdigest()}.tokens", lines, self.tokenizer, size=size)
            if not file.header.bytes:
                raise UserError(f"data: the split {name} holds no text; add some to its file or folder")
            self._files[name] = file
        return self._files[name]

    def _documents(self, name: str) -> Iterator[Document]:
        return (record["document"] for record in self._splits[name].records())

    def counts(self, name: str) -> Counts:
        """Amount of text of a split, with the number of tokens that an evaluation of the whole scores."""
        header = self.tokens(name).header
        return Counts(header.tokens - header.documents, header.bytes, header.words)

    def view(self, name: str, split: Split, *, training: bool, limit: int | None = None) -> Windows:
        """Random windows for training, sliding ones for evaluation; random ones too where they are limited."""
        options = {"name": name, "file": self.tokens(name), "tokenizer": self.tokenizer, "max_len": self.max_len}
        if training or limit is not None:
            return RandomWindows(seed=self._seed, limit=limit, **options)
        return SlidingWindows(stride=self.stride, **options)

    def sampled(self, name: str, *, batches: int, batch_size: int, seed: int) -> Iterator[TextRows]:
        """Batches of random windows, all tokens scored: nanoGPT's estimate of a loss is their mean.

        Args:
            batches, batch_size: Number of batches, and of windows of each.
            seed: Key of the windows, with the name of the split and the number of the batch.
        """
        windows = self.view(name, self._splits[name], training=False)
        for number in range(batches):
            rng = numpy_rng(seed, "sampled windows", name, number)
            yield windows.read(rng.integers(windows.starts, size=batch_size))

    def encode(self, record: Record, key: AugmentKey | None) -> Window:
        return record["window"]

    def collate(self, values: Sequence[Window]) -> TextRows:
        windows = values[0].windows
        return windows.rows(np.array([window.start for window in values]))
