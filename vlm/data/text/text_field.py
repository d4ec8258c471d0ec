"""The field of a language model: windows of tokens of encoded documents."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlm.data.batch import IGNORE, PADDING, Targets, TextRows, next_token_labels, text_bounds
from vlm.data.fields import AugmentKey, TokenField
from vlm.data.records import Record, Source, Split
from vlm.data.text.token_file import TokenFile, open_tokens
from vlm.data.text.tokenizer import Tokenizer
from vlm.data.text.words import Document
from vlm.errors import Count, UserError
from vlm.randomness import numpy_rng


class Window(NamedTuple):
    """A position in the tokens of a split."""

    windows: "Windows"
    start: int


class Windows(Split):
    """The windows of a split, each a record with its start; a subclass defines the starts.

    Args:
        name: Name of the split.
        file: Its tokens.
        tokenizer: The tokenizer.
        max_len: Number of tokens that the model reads at once; a window has one more.
    """

    def __init__(self, *, name: str, file: TokenFile, tokenizer: Tokenizer, max_len: int) -> None:
        self.name, self.file, self.max_len = name, file, max_len
        self.bos_id, self.pad_id = tokenizer.bos_id, tokenizer.pad_id
        self.tokens = file.tokens
        self._span = np.arange(max_len + 1)

    @property
    def starts(self) -> int:
        """Number of possible starts of a full window; 1 if the split is shorter than a window."""
        return max(1, len(self.tokens) - self.max_len)

    def record(self, index: int, epoch: int = 0) -> Record:
        start = self.place(index, epoch)
        return Record(f"{self.name}-{start}", {"window": Window(self, start)})

    def place(self, index: int, epoch: int) -> int:
        """Index of a window's first token."""
        raise TypeError(f"{type(self).__name__} has no places")

    def rows(self, starts: np.ndarray) -> TextRows:
        """The windows that begin at these tokens, as training or evaluation reads them."""
        return self.read(starts)

    def read(self, starts: np.ndarray) -> TextRows:
        """The windows that begin at these tokens, padded at the end of the split.

        Shapes:
            starts (B,) -> tokens (B, L+1)
        """
        at = starts[:, None] + self._span  # (B, L+1)
        inside = at < len(self.tokens)
        tokens = self.tokens[np.minimum(at, len(self.tokens) - 1)].astype(np.int64)
        begins = tokens[:, 1:] == self.bos_id
        segments = None
        if begins.any() or not inside.all():
            tokens[~inside] = self.pad_id
            segments = np.ones_like(tokens)
            segments[:, 1:] += begins.cumsum(1)
            segments[~inside] = PADDING
        rows = torch.from_numpy(tokens), None if segments is None else torch.from_numpy(segments)
        bounds = None if rows[1] is None else text_bounds(rows[1][:, :-1])
        return TextRows(*rows, window_targets(*rows), bounds=bounds)


class RandomWindows(Windows):
    """As many random windows per epoch as cover the split once, drawn by (seed, epoch, index).

    Windows ignore document boundaries (nanoGPT's sampling).

    Args:
        name, file, tokenizer, max_len: See Windows.
        seed: Seed of the starts.
        limit: Number of windows, the same in every epoch; None for all, which differ between epochs.
    Raises:
        UserError: The split is shorter than a window.
    """

    def __init__(self, *, seed: int, limit: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.seed, self.limit, self.fresh = seed, limit, limit is None
        self._places: tuple[int, np.ndarray] | None = None
        if len(self.tokens) <= self.max_len:
            raise UserError(
                f"data.max_len: {self.max_len} + 1 tokens are more than the {len(self.tokens)} of "
                f"the split {self.name}; set it to at most {len(self.tokens) - 1}, or add text"
            )

    def __len__(self) -> int:
        count = -(-len(self.tokens) // self.max_len)
        return count if self.limit is None else min(self.limit, count)

    def place(self, index: int, epoch: int) -> int:
        return int(self.places(epoch)[index])

    def places(self, epoch: int) -> np.ndarray:
        """Starts of all windows of an epoch; drawing them together is a thousand times faster than one by one."""
        epoch = epoch if self.limit is None else 0
        if self._places is None or self._places[0] != epoch:
            rng = numpy_rng(self.seed, "window", epoch)
            self._places = epoch, rng.integers(self.starts, size=len(self))
        return self._places[1]


class SlidingWindows(Windows):
    """Windows that advance by a stride and score the tokens that earlier ones did not.

    Every token except a document's first is scored once, with at least `max_len - stride + 1` tokens of context, or
    all.

    Args:
        name, file, tokenizer, max_len: See Windows.
        stride: Number of tokens between windows.
    """

    def __init__(self, *, stride: int, **options: Any) -> None:
        super().__init__(**options)
        self.stride = stride

    def __len__(self) -> int:
        return 1 + -(-(self.starts - 1) // self.stride)

    def place(self, index: int, epoch: int) -> int:
        return self.stride * index

    def rows(self, starts: np.ndarray) -> TextRows:
        rows = self.read(starts)
        context = np.where(starts == 0, 1, 1 + self.max_len - self.stride)  # (B,)
        scored = torch.from_numpy(self._span >= context[:, None])  # (B, L+1)
        if rows.segments is not None:
            scored &= (rows.segments != PADDING) & (rows.tokens != self.bos_id)
        rows.scored, rows.targets = scored, window_targets(rows.tokens, rows.segments, scored)
        return rows


def window_targets(tokens: Tensor, segments: Tensor | None, scored: Tensor | None = None) -> Targets:
    """Targets of all tokens except each row's last, which is only predicted.

    Args:
        scored: Tokens that count as predictions; None for all.
    Shapes:
        tokens (B, L+1), segments (B, L+1) or None, scored bool (B, L+1) or None -> targets of (B, L)
    """
    labels = next_token_labels(tokens, segments)[:, :-1]
    return Targets.from_labels(labels if scored is None else labels.masked_fill(~scored[:, 1:], IGNORE))


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
    reads_entire_split = True

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

    def sample_windows(self, name: str, *, batches: int, batch_size: int, seed: int) -> Iterator[TextRows]:
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
