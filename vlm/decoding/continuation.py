"""Continuing texts: many prompts of different lengths at once, each as if it were alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlm.decoding.sampling import Sampling
from vlm.models.decoder import Decoder
from vlm.nn.step.replay import Stepper
from vlm.randomness import numpy_rng


@dataclass(frozen=True)
class Drawn:
    """A token that was just drawn for a prompt, with the log-probability that the model gave it."""

    prompt: int
    token: int
    logprob: float


@torch.inference_mode()
def continue_texts(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    max_tokens: int,
    eos_id: int,
    seed: int,
) -> Iterator[list[Drawn]]:
    """Continues texts token by token until their end or max_tokens.

    What a prompt becomes depends on itself and the seed alone, not on the others or their order. Once a text is longer
    than the decoder's max_len, the model goes on from its newest half, and again whenever that has filled up.

    Args:
        prompts: Token ids, at least one each.
    Yields:
        After each step, what was drawn for every text that is not finished.
    """
    texts = [list(prompt) for prompt in prompts]
    draws = [numpy_rng(seed, "text", *prompt).random(max_tokens) for prompt in prompts]
    device = decoder.token_embed.weight.device
    rows = [row for row in range(len(texts)) if max_tokens > 0]
    steps: Stepper | None = None
    begins = [-1] * len(texts)
    for step in range(max_tokens):
        if not rows:
            return
        wanted = [context_begin(len(texts[row]), decoder.max_len) for row in rows]
        full = steps is not None and steps.state.length == decoder.max_len  # by a longer text, which has ended
        if steps is None or full or wanted != begins:
            begins = wanted
            steps, logits = _read([texts[row][at:] for row, at in zip(rows, begins, strict=True)], decoder, device)
        else:
            last = torch.tensor([texts[row][-1:] for row in rows], device=device)  # (R, 1)
            logits = steps.logits(last)  # (R, V)
        uniform = torch.from_numpy(np.array([draws[row][step] for row in rows])).to(device)
        tokens = sampling.draw(logits, uniform)
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        drawn = [Drawn(*values) for values in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)]
        for item in drawn:
            texts[item.prompt].append(item.token)
        yield drawn
        going = [place for place, item in enumerate(drawn) if item.token != eos_id]
        if len(going) < len(rows):
            rows, begins = [rows[place] for place in going], [begins[place] for place in going]
            steps.state.select(torch.tensor(going, device=device, dtype=torch.long))


def context_begin(length: int, window: int) -> int:
    """Index of the first token that the model sees of a text: a function of its length alone.

    It moves in strides of half a window, because every move means reading the whole context again.
    """
    stride = window - window // 2
    return 0 if length <= window else -(-(length - window) // stride) * stride


def _read(contexts: list[list[int]], decoder: Decoder, device: torch.device) -> tuple[Stepper, Tensor]:
    """Reads texts of different lengths, aligned at their ends."""
    longest = max(map(len, contexts))
    starts = [longest - len(context) for context in contexts]
    tokens = torch.tensor([[0] * start + context for start, context in zip(starts, contexts, strict=True)])
    ragged = torch.tensor(starts, device=device) if any(starts) else None
    steps = Stepper(decoder, decoder.start(None, rows=len(contexts), max_len=decoder.max_len, starts=ragged))
    return steps, steps.logits(tokens.to(device))
