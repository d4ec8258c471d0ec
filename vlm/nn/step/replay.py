"""Decode steps, one after the other; on a GPU, replayed."""

import logging
from collections.abc import Hashable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vlm.nn.attention import changing_lengths
from vlm.nn.step.fixed_state import FixedDecodeState
from vlm.nn.step.state import DecodeState

STATES = 32  # masked contexts are padded to a multiple of so many states, so that few shapes are recorded
WARM = 3  # steps before one is recorded, in which libraries set themselves up
log = logging.getLogger(__name__)


def replayed(device: torch.device) -> bool:
    """True if steps are recorded and replayed there, and the host runs ahead of them."""
    return device.type == "cuda"


class Stepper:
    """Gives logits for the next tokens of each text.

    The kernels of a step take less time than the calls that launch them. Where texts are on a GPU, a step is therefore
    recorded once (a CUDA graph) and then launched as a whole, for as long as the numbers of rows and of the context's
    states stay.

    Args:
        decoder: The decoder.
        state: What its `start` gave. From the first step of one token on, `Stepper.state` may be another.
    """

    def __init__(self, decoder: Any, state: Any) -> None:
        self.decoder, self.state = decoder, state
        self._tokens, self._logits = torch.empty(0), torch.empty(0)  # the graph's
        self._graph: torch.cuda.CUDAGraph | None = None
        self._shape, self._steps = (0, 0, False), 0

    def logits(self, tokens: Tensor) -> Tensor:
        """Takes a step: tokens (R, L) -> logits after the last of them, float32 (R, V), until the next step."""
        if not replayed(tokens.device) or tokens.shape[1] != 1 or not isinstance(self.state, DecodeState):
            return self._launch(tokens)
        if not isinstance(self.state, FixedDecodeState):
            self.state = FixedDecodeState(self.state)
        shape = (len(tokens), self.state.states, self.state.mask is None)
        if shape != self._shape:
            self._graph, self._shape, self._steps = None, shape, 0
        self._steps += 1
        self.state.taken += 1
        if self._steps == WARM + 1:
            self._record(tokens)
        if self._graph is None:
            return self._launch(tokens)
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits

    def _launch(self, tokens: Tensor) -> Tensor:
        with changing_lengths(tokens.device):
            hidden = self.decoder.step(tokens, self.state)
            return self.decoder.head(hidden[:, -1]).float()

    def _record(self, tokens: Tensor) -> None:
        """Records a step without taking it. A model that cannot be recorded, as one that waits for results, goes on."""
        self._tokens, graph = tokens.clone(), torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(tokens.device)
        try:
            # Only this thread must not wait: the threads of loaders pin memory meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits = self._launch(self._tokens)
        except RuntimeError as fault:
            torch.cuda.set_stream(stream)  # a recording that cannot be ended leaves its own
            graph.reset()
            log.warning("decode steps are not replayed as a CUDA graph (%s)", str(fault).splitlines()[0])
            return
        self._graph = graph


class StepperPool:
    """Steppers that go on with the next batch of their shape, so that a step is recorded once for a whole evaluation.

    It holds the memory of their caches: whoever evaluates makes one, and lets go of it at the end. Texts begin anew in
    a used state as they do in the rows of others that have ended, so that no text depends on those before it.
    """

    def __init__(self) -> None:
        self._steppers: dict[Hashable, Stepper] = {}

    def begin(
        self, decoder: Any, context: Any, *, rows: int, max_len: int, beams: int, device: torch.device
    ) -> Stepper:
        """A stepper for new texts: rows sequences, `beams` of them side by side, of up to max_len tokens."""
        sizes = {"rows": rows, "max_len": max_len, "beams": beams}
        if not replayed(device):
            return Stepper(decoder, decoder.start(context, **sizes))
        if context is not None and context.mask is not None:
            context = context.padded(-(-context.states.shape[1] // STATES) * STATES)
        key = _places(decoder, context, *sizes.values())
        stepper = self._steppers.get(key)
        if stepper is None:
            stepper = self._steppers[key] = Stepper(decoder, decoder.start(context, **sizes))
        else:
            mask = None if context is None else context.mask
            stepper.state.replace(torch.arange(rows // beams, device=device), decoder.keys_values(context), mask)
        return stepper


def _places(decoder: torch.nn.Module, context: Any, *sizes: int) -> Hashable:
    """Sizes of a step's tensors, and the places of its weights: a recorded step reads these, whatever lies there."""
    weights = tuple(tensor.data_ptr() for tensor in chain(decoder.parameters(), decoder.buffers()))
    shape = None if context is None else (context.states.shape, context.states.dtype, context.mask is None)
    return sizes, weights, shape
