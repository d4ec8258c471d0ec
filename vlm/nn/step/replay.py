"""Runs decode steps; on a GPU, with fixed shapes, by replaying a CUDA graph."""

import logging
from collections.abc import Hashable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vlm.nn.attention import changing_lengths, to_additive_mask
from vlm.nn.step.block import KeyValueCache
from vlm.nn.step.state import DecodeState, State


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

    Each step attends to all slots of the cache and masks those that are still empty. Shapes never change, so that a
    GPU can record a step once and replay it. `num_steps` counts steps on the host; the caller of a replayed step
    increments it.
    """

    def __init__(self, state: DecodeState) -> None:
        rows, device = state.caches[0].keys.shape[0], state.device
        starts = torch.zeros(rows, dtype=torch.long, device=device) if state.starts is None else state.starts
        self.slots = torch.zeros(state.beams, dtype=torch.long, device=device)
        caches: list[KeyValueCache] = [FixedCache(cache, self.slots) for cache in state.caches]
        sizes = (state.beams, state.max_len, state.first)
        super().__init__(state.blocks, caches, state.context, state.mask, starts, *sizes)
        self.beam_ancestors, self.num_steps = state.beam_ancestors, state.length
        self.now = torch.full((1,), self.num_steps - 1, device=device)  # index of the last step

    @property
    def length(self) -> int:
        return self.num_steps

    @property
    def context_bias(self) -> Tensor | None:
        return None if self.mask is None else to_additive_mask(self.mask, self.caches[0].keys)[:, None, None]

    def reorder_beams(self, parents: Tensor) -> None:
        if self.beam_ancestors is not None:
            ancestors = self.beam_ancestors
            super().reorder_beams(parents)
            self.beam_ancestors = ancestors.copy_(self.beam_ancestors)

    def advance(self, length: int) -> tuple[Tensor, int]:
        """Like `DecodeState.advance`, for one token, with the step on the device and all slots visible.

        With four slots, at step 5:

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


STATES = 32  # masked contexts are padded to a multiple of this, so that few shapes are recorded
WARM = 3  # warm-up steps before recording, in which libraries initialise themselves
log = logging.getLogger(__name__)


def uses_cuda_graph(device: torch.device) -> bool:
    """Returns True if steps on this device are recorded and replayed."""
    return device.type == "cuda"


class Stepper:
    """Computes logits of the next tokens of each text.

    Launching the kernels of a step takes longer than running them. On a GPU a step is therefore recorded once as a CUDA
    graph and replayed as long as the numbers of rows and of context states do not change.

    Args:
        decoder: The decoder.
        state: Result of the decoder's `start`. `Stepper.state` may be another object after the first step of one token.
    """

    def __init__(self, decoder: Any, state: State) -> None:
        self.decoder, self.state = decoder, state
        self._tokens, self._logits = torch.empty(0), torch.empty(0)  # inputs and outputs of the graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self._shape, self._steps = (0, 0, False), 0

    def logits(self, tokens: Tensor) -> Tensor:
        """Runs a step: tokens (R, L) -> float32 logits (R, V) after the last token, valid until the next step."""
        # Hidden states are not recorded, because each of their steps creates new tensors.
        if not uses_cuda_graph(tokens.device) or tokens.shape[1] != 1 or not isinstance(self.state, DecodeState):
            return self._launch(tokens)
        if not isinstance(self.state, FixedDecodeState):
            self.state = FixedDecodeState(self.state)
        shape = (len(tokens), self.state.states, self.state.mask is None)
        if shape != self._shape:
            self._graph, self._shape, self._steps = None, shape, 0
        self._steps += 1
        self.state.num_steps += 1
        if self._steps == WARM + 1:
            self._record(tokens)
        if self._graph is None:
            return self._launch(tokens)
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """Runs a step that is not recorded: tokens (R, L) -> hidden states (R, L, D) of all tokens."""
        with changing_lengths(tokens.device):
            return self.decoder.step(tokens, self.state)

    def _launch(self, tokens: Tensor) -> Tensor:
        with changing_lengths(tokens.device):
            hidden = self.decoder.step(tokens, self.state)
            return self.decoder.head(hidden[:, -1]).float()

    def _record(self, tokens: Tensor) -> None:
        """Records a step without running it. If a model cannot be recorded, steps go on without a graph."""
        self._tokens, graph = tokens.clone(), torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(tokens.device)
        try:
            # Only this thread is restricted: the data loader's threads pin memory meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits = self._launch(self._tokens)
        except RuntimeError as fault:
            torch.cuda.set_stream(stream)  # a failed recording does not restore the stream
            graph.reset()
            log.warning("decode steps are not replayed as a CUDA graph (%s)", str(fault).splitlines()[0])
            return
        self._graph = graph


class StepperPool:
    """Reuses steppers for batches of the same shape, so that an evaluation records a step once.

    The pool holds the memory of the caches: an evaluation creates one and drops it at the end. New texts start in a
    used state as they do in finished rows, so no text depends on earlier ones.
    """

    def __init__(self) -> None:
        self._steppers: dict[Hashable, Stepper] = {}

    def begin(
        self, decoder: Any, context: Any, *, rows: int, max_len: int, beams: int, device: torch.device
    ) -> Stepper:
        """Returns a stepper for new texts: `rows` sequences, `beams` of them per input, of up to max_len tokens."""
        sizes = {"rows": rows, "max_len": max_len, "beams": beams}
        if not uses_cuda_graph(device):
            return Stepper(decoder, decoder.start(context, **sizes))
        if context is not None and context.mask is not None:
            context = context.pad_to(-(-context.states.shape[1] // STATES) * STATES)
        # The graph reads the weights at their addresses.
        weights = tuple(tensor.data_ptr() for tensor in chain(decoder.parameters(), decoder.buffers()))
        shape = None if context is None else (context.states.shape, context.states.dtype, context.mask is None)
        key = (rows, max_len, beams), weights, shape
        stepper = self._steppers.get(key)
        if stepper is None:
            stepper = self._steppers[key] = Stepper(decoder, decoder.start(context, **sizes))
        else:
            stepper.state.replace(torch.arange(rows // beams, device=device), decoder.read(context))
        return stepper
