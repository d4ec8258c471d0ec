"""The state of decoding between steps: a KV cache, or a fixed number of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.nn.attention import to_additive_mask
from vlm.nn.position import PositionInfo, Positions
from vlm.nn.step.block import KeyValueCache, StepBlock, StepInputs
from vlm.nn.step.native import NativeBlocks

KeysValues = tuple[Tensor, Tensor]


class ReadContext(NamedTuple):
    """The values that all texts of a row share, computed once.

    Args:
        keys_values: Keys and values of the context in each block, two of (B, N, S, K), or None.
        mask: States that texts attend to, (B, S); None for all.
        first: Position of the first token of a text, (B,) if it differs between rows.
        hidden: Initial hidden tensors (B, ...), for a decoder with a hidden state instead of a cache.
    """

    keys_values: Sequence[KeysValues | None]
    mask: Tensor | None = None
    first: int | Tensor = 0
    hidden: Sequence[Tensor] = ()


class State(Protocol):
    """The interface of a decoder's state between steps, either a cache (`DecodeState`) or a `HiddenState`.

    `select` keeps some of its rows, `replace` starts new texts in some, `reorder_beams` continues beam parents[b, g] as
    beam g of row b.
    """

    @property
    def length(self) -> int:
        """Number of steps taken so far."""
        ...

    def select(self, rows: Tensor) -> None: ...
    def replace(self, rows: Tensor, read: ReadContext) -> None: ...
    def reorder_beams(self, parents: Tensor) -> None: ...


@dataclass
class DecodeState:
    """The caches of B rows (images or texts) with G beams each; rows may begin and end at any step.

    Reordering beams does not move keys and values. The beams of a row share a ring buffer of steps that holds the keys
    of all of them, and `beam_ancestors` masks those that do not belong to a beam's history. Example: two beams, a
    and b, with four slots, whose text began at step 3, at step 5:

        slot of the ring            0         1         2         3
        step held                   4         5         2         3       steps 0 and 1 are overwritten
        keys in the cache        a4  b4    a5  b5    a2  b2    a3  b3
        from its start on           x         x         -         x       step held >= 3: a2 and b2 are of another text
        beam_ancestors of a       0   1     1   0     .   .     1   0     a5 continues b4, which continues a3
        visible to a                 b4    a5                  a3

    Args:
        blocks: The decoder's blocks, prepared for single steps.
        caches: One cache per block; the G beams of a step are adjacent.
        context: Keys and values per block, or None; blocks without cross-attention use them as a prefix.
        mask: Mask of the context.
        starts: Step at which the text of each row begins; None if all begin at 0.
        beams: Number G of beams per row.
        max_len: Maximum number of steps of a row.
        first: See ReadContext.
    Shapes:
        context two of (B, N, S, K), mask (B, S) or None, starts (B,) or None, beam_ancestors (B, G, steps, G) or None
    """

    blocks: list[StepBlock]
    caches: list[KeyValueCache]
    context: Sequence[KeysValues | None]
    mask: Tensor | None
    starts: Tensor | None = None
    beams: int = 1
    max_len: int = 0
    first: int | Tensor = 0

    def __post_init__(self) -> None:
        self.native: NativeBlocks | None = None  # the blocks in C++, where they are supported
        self.beam_ancestors: Tensor | None = None
        self._context_bias: Tensor | None = None
        if self.beams > 1:
            rows = self.caches[0].keys.shape[0]
            identity = torch.eye(self.beams, dtype=torch.bool, device=self.device)[:, None]  # (G, 1, G)
            self.beam_ancestors = identity.repeat(rows, 1, self.max_len, 1).view(
                rows, self.beams, self.max_len, self.beams
            )

    @property
    def device(self) -> torch.device:
        return self.caches[0].keys.device

    @property
    def length(self) -> int:
        """Number of steps taken so far."""
        return self.caches[0].length // self.beams

    @property
    def states(self) -> int:
        """Number S of context states; 0 without context."""
        return count_states(self.context)

    @property
    def prefix(self) -> int:
        """Number S of prefix states before the tokens of each row; 0 if the context is no prefix."""
        return 0 if self.blocks[0].cross is not None else self.states

    @property
    def context_bias(self) -> Tensor | None:
        """The context's mask as an additive bias, (B, 1, 1, S)."""
        if self.mask is not None and self._context_bias is None:
            self._context_bias = to_additive_mask(self.mask, self.caches[0].keys)[:, None, None]
        return self._context_bias

    def select(self, rows: Tensor) -> None:
        """Keeps only these rows (B',), in this order."""
        for cache in self.caches:
            cache.select(rows)
        self.context = [None if kv is None else (kv[0][rows], kv[1][rows]) for kv in self.context]
        self.mask = None if self.mask is None else self.mask[rows]
        self.starts = None if self.starts is None else self.starts[rows]
        self.first = self.first[rows] if isinstance(self.first, Tensor) else self.first
        self.beam_ancestors = None if self.beam_ancestors is None else self.beam_ancestors[rows]
        self._context_bias = None

    def rewind(self, length: int, max_len: int) -> None:
        """Keeps only the first `length` steps, and extends the cache to max_len; all texts must have begun at step 0.

        No step may have been overwritten.
        """
        for cache in self.caches:
            cache.length = length * self.beams
            if max_len > self.max_len:
                cache.widen(max_len * self.beams)
        self.max_len = max(self.max_len, max_len)

    def replace(self, rows: Tensor, read: ReadContext) -> None:
        """Starts new texts in these rows (B',), after their context."""
        first = read.first
        if not isinstance(self.first, Tensor) and (isinstance(first, Tensor) or first != self.first):
            self.first = torch.full((self.caches[0].keys.shape[0],), self.first, device=self.device)
        if isinstance(self.first, Tensor):
            self.first[rows] = first
        self.context, self.mask = replace_rows(self.context, self.mask, rows, read.keys_values, read.mask)
        if self.starts is None:
            self.starts = torch.zeros(self.caches[0].keys.shape[0], dtype=torch.long, device=self.device)
        self.starts[rows] = self.length
        self._context_bias = None

    def reorder_beams(self, parents: Tensor) -> None:
        """Reorders beams: beam g of row b continues beam parents[b, g], (B, G). Keys and values are not moved."""
        if self.beam_ancestors is not None:
            index = parents[:, :, None, None].expand_as(self.beam_ancestors)
            self.beam_ancestors = self.beam_ancestors.gather(1, index)

    def next_step_inputs(self, positions: Positions, length: int) -> tuple[Tensor, StepInputs]:
        """Positions of the next `length` tokens, (L,) or (B * G, L), and the inputs of their step."""
        steps, slots = self.advance(length)
        at = steps
        if self.starts is not None:
            at = (steps - self.starts[:, None]).clamp(0, self.max_len - 1)  # (B, L)
        if isinstance(self.first, Tensor):
            at = at + self.first[:, None]
        elif self.first:
            at = at + self.first
        if at.ndim == 2:
            at = at.repeat_interleave(self.beams, 0)  # (B * G, L)
        if self.beam_ancestors is not None:
            new = torch.eye(self.beams, dtype=torch.bool, device=self.device)[:, None]
            self.beam_ancestors[:, :, steps % self.max_len] = new
        position = positions.place(at, keys=slots)
        return at, StepInputs(
            self.beams, length, self._arrange_like_queries(position, length), self._bias(position, steps, slots)
        )

    def advance(self, length: int) -> tuple[Tensor, int]:
        """Indices of the next steps, (L,), and the number of ring slots that they attend to."""
        begin = self.length
        return torch.arange(begin, begin + length, device=self.device), min(begin + length, self.max_len)

    def _bias(self, position: PositionInfo, steps: Tensor, slots: int) -> Tensor | None:
        """The attention bias of a step; None if every token attends to all keys.

        It has five axes: row, beam of the query, its token, slot, beam of the key. Each part depends on some of them:

            age of a slot              .  .  .  s  .       steps since it was written, 0 for the newest
        step held                  .  .  .  s  .       newest step - age; negative if never written
            step held <= query's step  .  .  L  s  .
            step held >= start         B  .  L  s  .       padding before a text attends to itself: no row is empty
            ancestors                  B  G  .  s  G
            bias of the positions      N  .  L  s  .       of the oldest key first: column -1 - age
            folded                     B or N, G * L, s * G

        Shapes:
            -> (B or 1, N or 1, G * L, slots * G), after S columns of the prefix if there is one
        """
        newest = steps[-1:]
        age = (newest - torch.arange(slots, device=self.device)) % self.max_len
        held = newest - age
        visible = None if len(steps) == 1 else held <= steps[:, None]  # (L, slots)
        if self.starts is not None:
            started = held >= torch.minimum(self.starts[:, None], steps)[..., None]  # (B, L, slots)
            visible = started if visible is None else started & visible
        if visible is not None:
            visible = visible.expand(-1 if visible.ndim == 3 else 1, -1, -1)[
                :, None, :, :, None
            ]  # (B or 1, 1, L, slots, 1)
        if self.beam_ancestors is not None:
            ancestors = self.beam_ancestors[:, :, None, :slots]  # (B, G, 1, slots, G)
            visible = ancestors if visible is None else visible & ancestors
        mask = (
            None
            if visible is None
            else to_additive_mask(self._fold_beams(visible, len(steps)), self.caches[0].keys)[:, None]
        )
        if position.bias is not None:
            placed = position.bias[:, :, slots - 1 - age]  # (N, L, slots)
            bias = self._fold_beams(placed[:, None, :, :, None], len(steps))[None]
            mask = bias if mask is None else mask + bias
        return self._prepend_prefix(mask, slots * self.beams)

    def _fold_beams(self, part: Tensor, length: int) -> Tensor:
        """The five axes as (..., G * L, slots * G)."""
        expanded = part.expand(-1, self.beams, length, -1, self.beams)
        return expanded.reshape(len(part), self.beams * length, part.shape[3] * self.beams)

    def _prepend_prefix(self, bias: Tensor | None, keys: int) -> Tensor | None:
        """Puts the columns of the prefix, shared by all beams and tokens of a row, before a step's bias."""
        if not self.prefix or (bias is None and self.mask is None):
            return bias
        like = self.caches[0].keys
        parts = [
            like.new_zeros(1, 1, 1, size) if part is None else part
            for part, size in ((self.context_bias, self.prefix), (bias, keys))
        ]
        shape = torch.broadcast_shapes(*(part.shape[:3] for part in parts))
        return torch.cat([part.expand(*shape, -1) for part in parts], dim=-1)

    def _arrange_like_queries(self, position: PositionInfo, length: int) -> PositionInfo:
        """Arranges position information like the queries."""

        def arrange(part: Tensor) -> Tensor:
            if part.ndim == 4:  # (B * G, 1, L, K)
                return part.view(-1, 1, self.beams * length, part.shape[-1])
            return part.repeat(self.beams, 1) if self.beams > 1 else part  # (L, K)

        added, rotation = position.added, position.rotation
        return PositionInfo(
            added=None if added is None else arrange(added),
            rotation=None if rotation is None else (arrange(rotation[0]), arrange(rotation[1])),
        )


def count_states(context: Sequence[KeysValues | None]) -> int:
    """Number S of states of a context, from its keys and values in each block; 0 if there are none."""
    return next((keys.shape[2] for keys, _ in filter(None, context)), 0)


def replace_rows(
    held: Sequence[KeysValues | None],
    mask: Tensor | None,
    rows: Tensor,
    new: Sequence[KeysValues | None],
    new_mask: Tensor | None,
) -> tuple[Sequence[KeysValues | None], Tensor | None]:
    """Contexts and their mask with those of some rows (B',) replaced; shorter ones are padded and masked."""
    sizes = count_states(held), count_states(new)
    if min(sizes) < max(sizes) or (mask is None) != (new_mask is None):
        held, mask = pad_context(held, mask, max(sizes))
        new, new_mask = pad_context(new, new_mask, max(sizes))
    for old, pair in zip(held, new, strict=True):
        if old is not None and pair is not None:
            old[0][rows], old[1][rows] = pair
    if mask is not None and new_mask is not None:
        mask[rows] = new_mask
    return held, mask


def pad_context(
    context: Sequence[KeysValues | None], mask: Tensor | None, length: int
) -> tuple[list[KeysValues | None], Tensor | None]:
    """Pads keys, values and mask of a context to a length; the padding is masked."""
    like = next((keys for keys, _ in filter(None, context)), None)
    if like is None:
        return list(context), mask
    rows, _, states, _ = like.shape
    mask = like.new_ones(rows, states, dtype=torch.bool) if mask is None else mask
    if (more := length - states) == 0:
        return list(context), mask
    widen = (0, 0, 0, more)
    pairs = [None if pair is None else (F.pad(pair[0], widen), F.pad(pair[1], widen)) for pair in context]
    return pairs, F.pad(mask, (0, more))


class HiddenState:
    """Hidden tensors of B rows with G beams each; rows may begin and end at any step.

    Attributes:
        hidden: The hidden tensors.
        context: Keys and values of the context, as in `ReadContext`.
        mask: States that may be attended to; None for all.
        length: Number of steps taken so far.
    Args:
        read: Initial hidden tensors and context, of each row, or of one row for all.
        rows: Number B of rows.
        beams: Number G of beams per row.
        starts: Step of each row's first token, (B,); None if all begin at 0. Earlier tokens are padding.
    Shapes:
        hidden (B, G, ...) each, mask (B, S) or None
    """

    def __init__(self, read: ReadContext, *, rows: int, beams: int, starts: Tensor | None = None) -> None:
        self.context, self.mask = read.keys_values, read.mask
        self.beams, self.starts, self.length = beams, starts, 0
        self.hidden = [tensor[:, None].expand(rows, beams, *tensor.shape[1:]).clone() for tensor in read.hidden]

    def advance(self, hidden: Sequence[Tensor]) -> None:
        """Stores the hidden tensors after a token, except in rows whose text has not begun."""
        if self.starts is not None:
            started = self.starts <= self.length
            pairs = zip(hidden, self.hidden, strict=True)
            hidden = [torch.where(_unsqueeze_like(started, new), new, old) for new, old in pairs]
        self.hidden = list(hidden)
        self.length += 1

    def select(self, rows: Tensor) -> None:
        """Keeps only these rows (B',), in this order."""
        self.hidden = [tensor[rows] for tensor in self.hidden]
        self.context = [None if kv is None else (kv[0][rows], kv[1][rows]) for kv in self.context]
        self.mask = None if self.mask is None else self.mask[rows]
        self.starts = None if self.starts is None else self.starts[rows]

    def replace(self, rows: Tensor, read: ReadContext) -> None:
        """Starts new texts in these rows (B',), after their context."""
        self.context, self.mask = replace_rows(self.context, self.mask, rows, read.keys_values, read.mask)
        for held, new in zip(self.hidden, read.hidden, strict=True):
            held[rows] = new[:, None]
        if self.starts is not None:
            self.starts[rows] = self.length

    def reorder_beams(self, parents: Tensor) -> None:
        """Reorders beams: beam g of row b continues beam parents[b, g], (B, G)."""
        self.hidden = [tensor.gather(1, _unsqueeze_like(parents, tensor).expand_as(tensor)) for tensor in self.hidden]


def _unsqueeze_like(x: Tensor, like: Tensor) -> Tensor:
    """Adds trailing axes to a tensor so that it broadcasts over `like`."""
    return x.view(*x.shape, *[1] * (like.ndim - x.ndim))
