"""Windows of a token file: random ones for training, sliding ones for evaluation."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlm.data.batch import IGNORE, PADDING, Targets, TextRows, next_token_labels, text_bounds
from vlm.data.records import Record, Split
from vlm.data.text.token_file import TokenFile
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import UserError
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
        seen = np.where(starts == 0, 1, 1 + self.max_len - self.stride)  # (B,)
        scored = torch.from_numpy(self._span >= seen[:, None])  # (B, L+1)
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
    return Targets.of(labels if scored is None else labels.masked_fill(~scored[:, 1:], IGNORE))
