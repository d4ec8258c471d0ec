"""The texts so far, on the device beside the model, and their rules."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlm.decoding.constraints import Rules, follows, penalise, repeats


class TokenHistory:
    """Texts of R rows of G beams from the begin token on, in memory allocated once; kept only if a rule reads them.

    Args:
        rows: Number R of rows.
        beams: Number G of beams.
        max_len: Room of a text.
    """

    def __init__(self, rules: Rules, *, rows: int, beams: int, max_len: int, bos_id: int, device: torch.device) -> None:
        self.rules, self.bos_id = rules, bos_id
        self.tokens = torch.full((rows, beams, max_len + 1), -1, device=device)  # one more: what is never read
        self.lengths = torch.zeros(rows, 1, 1, dtype=torch.long, device=device)
        self.begun = torch.ones_like(self.lengths)  # tokens that no rule on lengths counts
        # Copied to the device here, once: each copy in a step would wait for it.
        self.banned = [(torch.tensor(run[:-1], dtype=torch.long, device=device), run[-1]) for run in rules.banned]
        self.begin(torch.arange(rows, device=device))

    def begin(self, rows: Tensor) -> None:
        self.tokens[rows] = -1
        self.tokens[rows, :, 0] = self.bos_id
        self.lengths[rows] = 1

    def read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begins each text with the tokens of a prompt in place of the begin token."""
        for row, prompt in enumerate(prompts):
            self.tokens[row, :, : len(prompt)] = torch.tensor(prompt, device=self.tokens.device)
            self.lengths[row] = self.begun[row] = len(prompt)

    def append(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Adds a token to each text: tokens (R, G); parents (R, G) or None are the beams that they follow."""
        if parents is not None:
            self.tokens = self.tokens.gather(1, parents[..., None].expand_as(self.tokens))
        self.tokens.scatter_(2, self.lengths.expand(-1, tokens.shape[1], 1), tokens[..., None])
        # Texts that have ended go on until others take their rows: their tokens pile up in the place never read.
        self.lengths = (self.lengths + 1).clamp(max=self.tokens.shape[2] - 1)

    def select(self, rows: Tensor) -> None:
        self.tokens, self.lengths, self.begun = self.tokens[rows], self.lengths[rows], self.begun[rows]

    def constrain(self, scores: Tensor, eos_id: int) -> Tensor:
        """Scores (R * G, V) after all rules but the required words, -inf where a token may not come.

        Changes its argument. Masks are applied whole: picking rows by a bool mask would wait for the device.
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
        if rules.min_tokens and 0 <= eos_id < scores.shape[1]:
            scores[:, eos_id].masked_fill_(chosen < rules.min_tokens, -torch.inf)
        return scores
