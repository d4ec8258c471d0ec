"""A decode state whose steps are alike, so that a GPU can replay one as it was recorded."""

import torch
from torch import Tensor

from vlm.nn.mask import as_bias
from vlm.nn.step.cache import KeyValueCache
from vlm.nn.step.state import DecodeState


class FixedCache(KeyValueCache):
    """A cache that reads the places of new tokens from the device, and always shows all that it has room for.

    Args:
        cache: Whose memory it takes over.
        slots: Places of the next tokens, (G,); rewritten for each step.
    """

    def __init__(self, cache: KeyValueCache, slots: Tensor) -> None:
        self.keys, self.values, self.length, self.slots = cache.keys, cache.values, cache.length, slots

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slots, k.to(self.keys.dtype))
        self.values.index_copy_(2, self.slots, v.to(self.values.dtype))
        return self.keys, self.values


class FixedDecodeState(DecodeState):
    """Goes on from another state, one token a step, with every number that changes held on the device.

    Each step looks at the whole cache, with a mask over what is not written yet, and shapes never change: what a step
    launches on a GPU can be recorded once and replayed. `taken` is the host's count of steps; the caller of a replayed
    step adds 1.
    """

    def __init__(self, state: DecodeState) -> None:
        rows, device = state.caches[0].keys.shape[0], state.device
        starts = torch.zeros(rows, dtype=torch.long, device=device) if state.starts is None else state.starts
        self.slots = torch.zeros(state.beams, dtype=torch.long, device=device)
        caches: list[KeyValueCache] = [FixedCache(cache, self.slots) for cache in state.caches]
        sizes = {"beams": state.beams, "max_len": state.max_len, "first": state.first}
        super().__init__(state.blocks, caches, state.context, state.mask, starts, **sizes)
        self.beam_ancestors, self.taken = state.beam_ancestors, state.length
        self.now = torch.full((1,), self.taken - 1, device=device)  # the step that was taken last

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
        """As in DecodeState, for one token, with the step on the device and all slots shown.

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
