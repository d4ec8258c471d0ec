"""Choosing the next token: pure functions over a model's decode step."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vlm.models.context import Context
from vlm.models.decoder import DecodeState


class StepDecoder(Protocol):
    """What decoding needs of a decoder."""

    max_len: int

    def start(self, context: Context | None, *, rows: int, max_len: int) -> DecodeState: ...
    def step(self, tokens: Tensor, state: DecodeState) -> Tensor: ...
    def head(self, hidden: Tensor) -> Tensor: ...


@dataclass
class Sequences:
    """Decoded token ids and their log-probabilities, one list a row, both without the begin and with the end token."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


@torch.inference_mode()
def greedy(decoder: StepDecoder, context: Context, *, bos_id: int, eos_id: int, max_tokens: int) -> Sequences:
    """Takes the most probable token at each step until the end token or max_tokens.

    Args:
        max_tokens: The longest text, in tokens, the end token not counted; never more than the decoder has room for.
    Shapes:
        context states (B, S, D) -> B sequences
    """
    rows, device = context.states.shape[0], context.states.device
    steps = min(max_tokens + 1, decoder.max_len)
    state = decoder.start(context, rows=rows, max_len=steps)
    token = torch.full((rows, 1), bos_id, device=device)
    finished = torch.zeros(rows, 1, dtype=torch.bool, device=device)
    tokens, logprobs = [], []
    for _ in range(steps):
        scores = decoder.head(decoder.step(token, state)[:, -1]).float().log_softmax(-1)  # (B, V)
        logprob, token = scores.max(-1, keepdim=True)  # each (B, 1)
        tokens.append(token)
        logprobs.append(logprob)
        finished |= token == eos_id
        if finished.all():
            break
    return _cut(torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist(), eos_id, max_tokens)


def _cut(tokens: list[list[int]], logprobs: list[list[float]], eos_id: int, max_tokens: int) -> Sequences:
    # The last step of all is there for an end token only.
    ends = [row.index(eos_id) + 1 if eos_id in row else min(len(row), max_tokens) for row in tokens]
    return Sequences(
        [row[:end] for row, end in zip(tokens, ends, strict=True)],
        [row[:end] for row, end in zip(logprobs, ends, strict=True)],
    )
