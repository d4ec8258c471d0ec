"""The field of a language model: documents, encoded once and read as windows of tokens."""

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

LEARNED_FROM = 2**26  # approximate number of bytes that a tokenizer is learned from


class Counts(NamedTuple):
    """Divisors of the loss of a whole split: scored tokens (all but the first of each document), bytes, words."""

    tokens: int
    bytes: int
    words: int


class TextField(TokenField):
    """Documents as windows of max_len + 1 tokens; the last one is only a target.

    The documents of a split are encoded once into a memory-mapped file.

    Args:
        tokenizer: Learned from the training split, unless it is already learned.
        max_len: Number of tokens that the model reads at once.
        stride: Number of tokens between windows in evaluation; smaller ones give more context and take longer. Default
            max_len / 2.
    Shapes:
        TextRows of tokens (B, L+1), segments (B, L+1), or None if each row is a single document
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
        """Encodes all splits, so that errors show at once."""
        for name in self._splits:
            self.tokens(name)
        self.view("train", self._splits["train"], training=True)

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self._files.clear()

    def identity(self, record: Record) -> Sequence[str]:
        window: Window = record["window"]
        header = window.windows.file.header
        return header.digest, str(header.tokens), header.tokenizer

    def tokens(self, name: str) -> TokenFile:
        """The token ids of a split, from the cache if possible.

        Raises:
            UserError: The split has no text, its text cannot be read, or its tokens cannot be written.
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
                raise UserError(f"data: the split {name} has no text; add some to its file or folder")
            self._files[name] = file
        return self._files[name]

    def _documents(self, name: str) -> Iterator[Document]:
        return (record["document"] for record in self._splits[name].records())

    def counts(self, name: str) -> Counts:
        """Amount of text of a split, and number of tokens that its evaluation scores."""
        header = self.tokens(name).header
        return Counts(header.tokens - header.documents, header.bytes, header.words)

    def view(self, name: str, split: Split, *, training: bool, limit: int | None = None) -> Windows:
        """Random windows for training, sliding windows for evaluation; random windows if their number is limited."""
        options = {"name": name, "file": self.tokens(name), "tokenizer": self.tokenizer, "max_len": self.max_len}
        if training or limit is not None:
            return RandomWindows(seed=self._seed, limit=limit, **options)
        return SlidingWindows(stride=self.stride, **options)

    def sampled(self, name: str, *, batches: int, batch_size: int, seed: int) -> Iterator[TextRows]:
        """Batches of random windows with all tokens scored, for nanoGPT's estimate of the loss.

        Args:
            batches, batch_size: Number of batches, and of windows per batch.
            seed: Seed of the windows, combined with the split's name and the batch number.
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
