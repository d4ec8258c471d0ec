"""The state of decoding from step to step: keys and values of texts of different ages, each with its beams."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.nn.mask import as_bias
from vlm.nn.position import PositionInfo, Positions
from vlm.nn.step.block import StepBlock, StepInputs
from vlm.nn.step.cache import KeyValueCache

KeysValues = tuple[Tensor, Tensor]


@dataclass
class DecodeState:
    """The caches of B rows (images, or texts) with G beams each; rows may begin at any step and end at any.

    Keys and values are never moved when beams are reordered. A row's beams share its cache, a ring of steps that holds
    the keys of all of them, and `beam_ancestors` says which of these a beam goes back to, so that it sees no others. A
    row of two beams, a and b, with room for four steps, whose text began at step 3, at step 5:

        slot of the ring            0         1         2         3
        step held                   4         5         2         3       steps 0 and 1 are overwritten
        keys in the cache        a4  b4    a5  b5    a2  b2    a3  b3
        from its start on           x         x         -         x       step held >= 3: a2 and b2 are of another text
        beam_ancestors of a       0   1     1   0     .   .     1   0     a went on from b at step 4, and that from a
        seen by a                    b4    a5                  a3

    Args:
        blocks: The decoder's, as steps call them.
        caches: One a block; a step's G beams lie side by side.
        context: Keys and values of each block, or None.
        mask: Of the context.
        starts: Step at which each row's text begins; None if all begin at 0.
        beams: Number G of beams a row.
        max_len: Steps that a row may take.
    Shapes:
        context two of (B, N, S, K), mask (B, S) or None, starts (B,) or None, beam_ancestors (B, G, steps, G) or None
    """

    blocks: list[StepBlock]
    caches: list[KeyValueCache]
    context: list[KeysValues | None]
    mask: Tensor | None
    starts: Tensor | None = None
    beams: int = 1
    max_len: int = 0

    def __post_init__(self) -> None:
        self.beam_ancestors: Tensor | None = None
        self._context_bias: Tensor | None = None
        if self.beams > 1:
            rows = self.caches[0].keys.shape[0]
            own = torch.eye(self.beams, dtype=torch.bool, device=self.device)[:, None]  # (G, 1, G)
            self.beam_ancestors = own.repeat(rows, 1, self.max_len, 1).view(rows, self.beams, self.max_len, self.beams)

    @property
    def device(self) -> torch.device:
        return self.caches[0].keys.device

    @property
    def length(self) -> int:
        """Steps taken so far."""
        return self.caches[0].length // self.beams

    @property
    def states(self) -> int:
        """Number S of states of the context; 0 without any."""
        return states_of(self.context)

    @property
    def context_bias(self) -> Tensor | None:
        """The context's mask as what is added to products, (B, 1, 1, S)."""
        if self.mask is not None and self._context_bias is None:
            self._context_bias = as_bias(self.mask, self.caches[0].keys)[:, None, None]
        return self._context_bias

    def select(self, rows: Tensor) -> None:
        """Keeps these rows (B',), in this order."""
        for cache in self.caches:
            cache.select(rows)
        self.context = [None if kv is None else (kv[0][rows], kv[1][rows]) for kv in self.context]
        self.mask = None if self.mask is None else self.mask[rows]
        self.starts = None if self.starts is None else self.starts[rows]
        self.beam_ancestors = None if self.beam_ancestors is None else self.beam_ancestors[rows]
        self._context_bias = None

    def replace(self, rows: Tensor, context: list[KeysValues | None], mask: Tensor | None) -> None:
        """Gives rows (B',) to new texts, which begin now, with the keys and values of their context.

        Contexts may have other lengths: the shorter ones are padded, and what was added is masked.
        """
        length = max(self.states, states_of(context))
        if length > min(self.states, states_of(context)) or (self.mask is None) != (mask is None):
            self.context, self.mask = padded(self.context, self.mask, length)
            context, mask = padded(context, mask, length)
        for held, new in zip(self.context, context, strict=True):
            if held is not None and new is not None:
                held[0][rows], held[1][rows] = new
        if self.mask is not None and mask is not None:
            self.mask[rows] = mask
        if self.starts is None:
            self.starts = torch.zeros(self.caches[0].keys.shape[0], dtype=torch.long, device=self.device)
        self.starts[rows] = self.length
        self._context_bias = None

    def reorder_beams(self, parents: Tensor) -> None:
        """Makes each beam go on from another of its row: parents (B, G), places among the row's beams."""
        if self.beam_ancestors is not None:
            index = parents[:, :, None, None].expand_as(self.beam_ancestors)
            self.beam_ancestors = self.beam_ancestors.gather(1, index)

    def look(self, positions: Positions, length: int) -> tuple[Tensor, StepInputs]:
        """Positions of the next `length` tokens, (L,) or (B * G, L), and the inputs of their step.

        The bias is made of three parts, each with the axes that it depends on:

            step held <= own step, >= start    (B or 1, L, slots)       one query a token, one key a slot
            beam_ancestors                     (B, G, slots, G)         one query a beam, G keys a slot
            bias of the positions              (N, L, slots)
            together                           (B, N or 1, G * L, slots * G)
        """
        begin, beams = self.length, self.beams
        steps = torch.arange(begin, begin + length, device=self.device)  # (L,)
        at = steps
        if self.starts is not None:
            at = (steps - self.starts[:, None]).clamp(0, self.max_len - 1).repeat_interleave(beams, 0)  # (B * G, L)
        if self.beam_ancestors is not None:
            places = steps % self.max_len
            self.beam_ancestors[:, :, places] = torch.eye(beams, dtype=torch.bool, device=self.device)[:, None]
        position = positions.place(at, keys=min(begin + length, self.max_len))
        return at, StepInputs(beams, length, self._spread(position, length), self._bias(position, steps))

    def _bias(self, position: PositionInfo, steps: Tensor) -> Tensor | None:
        """(B or 1, N or 1, G * L, slots * G), or None where each token sees the whole cache."""
        length, end = len(steps), self.length + len(steps)
        held = self._steps_held(end)  # (slots,)
        bias = (
            None if position.bias is None else position.bias.roll(end % self.max_len if end > self.max_len else 0, -1)
        )
        seen = None
        if length > 1 or self.starts is not None:
            seen = (held <= steps[:, None])[None]  # (1, L, slots)
        if self.starts is not None and seen is not None:
            own = held == steps[:, None]  # what stands before the start must attend to something, if only itself
            seen = seen & ((held >= self.starts[:, None])[:, None] | own)  # (B, L, slots)
        return self._masked(bias, seen, len(held), length)

    def _masked(self, bias: Tensor | None, seen: Tensor | None, slots: int, length: int) -> Tensor | None:
        """A bias (N, L, slots) together with what may be seen, (B or 1, L, slots)."""
        if self.beam_ancestors is not None:
            return self._bias_of_beams(bias, seen, slots, length)
        if seen is None:
            return None if bias is None else bias[None]
        masked = as_bias(seen, self.caches[0].keys)[:, None]  # (B or 1, 1, L, slots)
        return masked if bias is None else masked + bias

    def _bias_of_beams(self, bias: Tensor | None, seen: Tensor | None, slots: int, length: int) -> Tensor:
        """As `_masked`, for beams: axes are (row, beam of the query, its token, slot, beam of the key), then folded."""
        assert self.beam_ancestors is not None
        rows, beams = self.beam_ancestors.shape[:2]
        sees = self.beam_ancestors[:, :, None, :slots].expand(-1, -1, length, -1, -1)  # (B, G, L, slots, G)
        if seen is not None:
            sees = sees & seen[:, None, :, :, None]
        flat = sees.reshape(rows, 1, beams * length, slots * beams)
        masked = as_bias(flat, self.caches[0].keys)
        if bias is None:
            return masked
        heads = bias.shape[0]
        spread = bias[:, None, :, :, None].expand(heads, beams, length, slots, beams)
        return masked + spread.reshape(heads, beams * length, slots * beams)

    def _steps_held(self, end: int) -> Tensor:
        """The step at which each slot of the ring is written, once those up to `end` are: (slots,)."""
        slots = torch.arange(min(end, self.max_len), device=self.device)
        return slots if end <= self.max_len else end - 1 - (end - 1 - slots) % self.max_len

    def _spread(self, position: PositionInfo, length: int) -> PositionInfo:
        """Position information, laid out as the queries are."""

        def laid_out(part: Tensor) -> Tensor:
            if self.starts is not None:  # (B * G, 1, L, K)
                return part.view(-1, 1, self.beams * length, part.shape[-1])
            return part.repeat(self.beams, 1) if self.beams > 1 else part  # (L, K)

        added, rotation = position.added, position.rotation
        return PositionInfo(
            added=None if added is None else laid_out(added),
            rotation=None if rotation is None else (laid_out(rotation[0]), laid_out(rotation[1])),
        )


def states_of(context: Sequence[KeysValues | None]) -> int:
    """Number S of states of a context, from its keys and values in each block; 0 where there is none."""
    return next((keys.shape[2] for keys, _ in filter(None, context)), 0)


def padded(
    context: Sequence[KeysValues | None], mask: Tensor | None, length: int
) -> tuple[list[KeysValues | None], Tensor | None]:
    """Keys, values and mask of a context with further states, up to a length, that may not be attended to."""
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
