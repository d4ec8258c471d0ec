"""Log-probabilities of tokens according to the model, and of the most probable tokens at the same place."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vlm.models.decoder import TextDecoder

CHUNK = 256  # positions of a prompt whose logits are in memory at the same time


class TokenScore(NamedTuple):
    """The log-probability of a token, in nats, from the logits before temperature, penalties, bias and masks.

    Args:
        top: Ids of the most probable tokens with their log-probabilities, the most probable first, and the token itself
            if it is not among them.
    """

    token: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


def score_tokens(logits: Tensor, tokens: Tensor, top: int) -> list[TokenScore]:
    """Returns the score of each token, with the `top` most probable ones.

    The device is waited for once.

    Shapes:
        logits float32 (R, V), tokens (R,)
    """
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])  # (R, 1)
    best = logprobs.topk(min(top, logits.shape[1]))
    # float32 holds all ids
    table = torch.cat([tokens[:, None].float(), chosen, best.indices.float(), best.values], 1).tolist()
    scores = []
    for token, logprob, *rest in table:
        ids, values = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        pairs = [(int(id), value) for id, value in zip(ids, values, strict=True)]
        if pairs and all(id != token for id, _ in pairs):
            pairs.append((int(token), logprob))
        scores.append(TokenScore(int(token), logprob, tuple(pairs)))
    return scores


def score_prompts(
    decoder: TextDecoder, hidden: Tensor, prompts: Sequence[Sequence[int]], top: int
) -> list[list[TokenScore | None]]:
    """Returns the score of each token of some prompts; None for the first, which nothing predicts.

    Args:
        hidden: Hidden states of the right-aligned prompts.
    Shapes:
        hidden (R, L, D)
    """
    found: list[list[TokenScore | None]] = []
    for row, prompt in enumerate(prompts):
        states = hidden[row, hidden.shape[1] - len(prompt) : -1]  # (length - 1, D)
        tokens = torch.tensor(prompt[1:], dtype=torch.long, device=hidden.device)
        scores: list[TokenScore | None] = [None]
        for part, chosen in zip(states.split(CHUNK), tokens.split(CHUNK), strict=True):
            scores += score_tokens(decoder.head(part).float(), chosen, top) if len(chosen) else []
        found.append(scores)
    return found
