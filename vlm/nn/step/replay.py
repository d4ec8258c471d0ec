"""Decode steps, one after the other; on a GPU, replayed."""

import logging
from typing import Any

import torch
from torch import Tensor

from vlm.nn.step.fixed_state import FixedDecodeState
from vlm.nn.step.state import DecodeState

WARM = 3  # steps before one is recorded, in which libraries set themselves up
log = logging.getLogger(__name__)


class Stepper:
    """Gives logits for the next tokens of each text.

    The kernels of a step take less time than the calls that launch them. Where texts are on a GPU, a step is therefore
    recorded once (a CUDA graph) and then launched as a whole, for as long as the number of rows stays.

    Args:
        decoder: The decoder.
        state: What its `start` gave. From the first step of one token on, `Stepper.state` may be another.
    """

    def __init__(self, decoder: Any, state: Any) -> None:
        self.decoder, self.state = decoder, state
        self._tokens, self._logits = torch.empty(0), torch.empty(0)  # the graph's
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rows, self._steps = 0, 0

    def logits(self, tokens: Tensor) -> Tensor:
        """Takes a step: tokens (R, L) -> logits after the last of them, float32 (R, V), until the next step."""
        if tokens.device.type != "cuda" or tokens.shape[1] != 1 or not isinstance(self.state, DecodeState):
            return self._launch(tokens)
        if not isinstance(self.state, FixedDecodeState):
            self.state = FixedDecodeState(self.state)
        if len(tokens) != self._rows:
            self._graph, self._rows, self._steps = None, len(tokens), 0
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
        hidden = self.decoder.step(tokens, self.state)
        return self.decoder.head(hidden[:, -1]).float()

    def _record(self, tokens: Tensor) -> None:
        """Records a step without taking it. A model that cannot be recorded, as one that waits for results, goes on."""
        self._tokens, graph = tokens.clone(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._logits = self._launch(self._tokens)
        except RuntimeError as fault:
            log.warning("decode steps are not replayed as a CUDA graph (%s)", str(fault).splitlines()[0])
            return
        self._graph = graph
