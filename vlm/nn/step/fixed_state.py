"""A decode state with fixed shapes, so that a GPU can replay a recorded step."""

import torch
from torch import Tensor

from vlm.nn.mask import as_bias
from vlm.nn.step.cache import KeyValueCache
from vlm.nn.step.state import DecodeState


class FixedCache(KeyValueCache):
    """A cache that reads the slots of new tokens from the device and always returns its full length.

    Args:
        cache: Cache whose memory is reused.
        slots: Slots of the next tokens, (G,); rewritten at each step.
    """

    def __init__(self, cache: KeyValueCache, slots: Tensor) -> None:
        self.keys, self.values, self.length, self.slots = cache.keys, cache.values, cache.length, slots

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slots, k.to(self.keys.dtype))
        self.values.index_copy_(2, self.slots, v.to(self.values.dtype))
        return self.keys, self.values


class FixedDecodeState(DecodeState):
    """Continues another state, one token per step, with everything that changes stored on the device.

    Each step attends to the whole cache and masks what is not written yet. Shapes never change, so that a GPU can
    record a step once and replay it. `taken` counts steps on the host; the caller of a replayed step increments it.
    """

    def __init__(self, state: DecodeState) -> None:
        rows, device = state.caches[0].keys.shape[0], state.device
        starts = torch.zeros(rows, dtype=torch.long, device=device) if state.starts is None else state.starts
        self.slots = torch.zeros(state.beams, dtype=torch.long, device=device)
        caches: list[KeyValueCache] = [FixedCache(cache, self.slots) for cache in state.caches]
        sizes = (state.beams, state.max_len, state.first)
        super().__init__(state.blocks, caches, state.context, state.mask, starts, *sizes)
        self.beam_ancestors, self.taken = state.beam_ancestors, state.length
        self.now = torch.full((1,), self.taken - 1, device=device)  # index of the last step

    @property
    def length(self) -> int:
        return self.taken

    @property
    def context_bias(self) -> Tensor | None:
        return None if self.mask is None else as_bias(self.mask, self.caches[0].keys)[:, None, None]

    def reorder_beams(self, parents: Tensor) -> None:
        if self.beam_ancestors is not None:
            held = self.beam_ancestors
            super().reorder_beams(parents)
            self.beam_ancestors = held.copy_(self.beam_ancestors)

    def advance(self, length: int) -> tuple[Tensor, int]:
        """Like `DecodeState.advance`, for one token, with the step on the device and all slots visible.

        With room for four steps, at step 5:

            slot           0    1    2    3
            age            1    0    3    2      (5 - slot) % 4
            step held      4    5    2    3      5 - age

        Raises:
            ValueError: length is not 1.
        """
        if length != 1:
            raise ValueError(f"a fixed state takes 1 token a step, not {length}")
        self.now += 1
        place = self.now % self.max_len
        self.slots.copy_(place * self.beams + torch.arange(self.beams, device=self.device))
        return self.now, self.max_len
