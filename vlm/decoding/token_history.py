"""The tokens generated so far, on the device, and the constraints that depend on them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlm.decoding.constraints import Rules, allow_end, follows, penalise, repeats, within
from vlm.decoding.sampling import Sampling


def history_of(
    rules: Rules, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, most: int, device: torch.device
) -> "TokenHistory | None":
    """Returns the tokens of prompts and their answers so far; None if no constraint needs them.

    Args:
        prompts: Their tokens. Negative ones stand for states of images, which no constraint reads.
        most: Maximum number of tokens of an answer.
    """
    if not rules.read_texts:
        return None
    known = [[max(token, prompt[0], 0) if token < 0 else token for token in prompt] for prompt in prompts]
    longest = max(map(len, known)) + most
    history = TokenHistory(rules, rows=len(known), beams=1, max_len=longest, bos_id=0, device=device)
    history.read([[*prompt, *answer] for prompt, answer in zip(known, answers, strict=True)])
    history.begun = torch.tensor([len(prompt) for prompt in known], device=device)[:, None, None]
    return history


def draw_next(
    sampling: Sampling, logits: Tensor, uniform: Tensor, history: "TokenHistory | None", ends: Sequence[int]
) -> Tensor:
    """Draws the next token of each text under its constraints, and adds it to the history, if there is one.

    Shapes:
        logits (R, V), uniform (R,) -> tokens (R,)
    """
    if history is None:
        return sampling.draw(logits, uniform)
    scores = history.constrain(logits.clone(), ends)
    allow_end(scores, ends[0])
    tokens = sampling.draw(scores, uniform)
    history.append(tokens[:, None], None)
    return tokens


class TokenHistory:
    """Tokens of R rows of G beams, begin token included, in preallocated memory. Used only if a constraint needs it.

    Args:
        rows: Number R of rows.
        beams: Number G of beams.
        max_len: Maximum number of tokens of a text.
    """

    def __init__(self, rules: Rules, *, rows: int, beams: int, max_len: int, bos_id: int, device: torch.device) -> None:
        self.rules, self.bos_id = rules, bos_id
        self.tokens = torch.full((rows, beams, max_len + 1), -1, device=device)  # the last column is never read
        self.lengths = torch.zeros(rows, 1, 1, dtype=torch.long, device=device)
        self.begun = torch.ones_like(self.lengths)  # number of leading tokens that do not count in lengths
        # Copied to the device once: a copy in each step would wait for the device.
        self.banned = [(torch.tensor(run[:-1], dtype=torch.long, device=device), run[-1]) for run in rules.banned]
        self.begin(torch.arange(rows, device=device))

    def begin(self, rows: Tensor) -> None:
        self.tokens[rows] = -1
        self.tokens[rows, :, 0] = self.bos_id
        self.lengths[rows] = 1

    def read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begins each text with the tokens of a prompt instead of the begin token."""
        for row, prompt in enumerate(prompts):
            self.tokens[row, :, : len(prompt)] = torch.tensor(prompt, device=self.tokens.device)
            self.lengths[row] = self.begun[row] = len(prompt)

    def append(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Appends a token to each text: tokens (R, G); parents (R, G) are the beams that they follow, or None."""
        if parents is not None:
            self.tokens = self.tokens.gather(1, parents[..., None].expand_as(self.tokens))
        self.tokens.scatter_(2, self.lengths.expand(-1, tokens.shape[1], 1), tokens[..., None])
        # Finished texts continue until others take their rows: their tokens are written to the column that is never
        # read.
        self.lengths = (self.lengths + 1).clamp(max=self.tokens.shape[2] - 1)

    def select(self, rows: Tensor) -> None:
        self.tokens, self.lengths, self.begun = self.tokens[rows], self.lengths[rows], self.begun[rows]

    def constrain(self, scores: Tensor, ends: Sequence[int]) -> Tensor:
        """Applies all constraints except required words to scores (R * G, V); forbidden tokens get -inf.

        Changes its argument. Masks apply to all rows, because indexing by a bool mask would wait for the device.
        """
        rules, texts = self.rules, self.tokens[:, :, :-1].flatten(0, 1)
        lengths, chosen = (
            counts.expand(-1, self.tokens.shape[1], 1).reshape(-1)
            for counts in (self.lengths, self.lengths - self.begun)
        )
        if rules.repetition_penalty != 1:
            scores = penalise(scores, texts, rules.repetition_penalty)
        if rules.no_repeat_ngram:
            scores.masked_fill_(repeats(texts, lengths, rules.no_repeat_ngram, scores.shape[1]), -torch.inf)
        for before, token in self.banned:
            scores[:, token].masked_fill_(follows(texts, lengths, before), -torch.inf)
        for end in within(ends, scores.shape[1]) if rules.min_tokens else ():
            scores[:, end].masked_fill_(chosen < rules.min_tokens, -torch.inf)
        return scores
