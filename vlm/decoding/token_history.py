"""The texts so far, as the rules read them: on the device, beside the model."""

import torch
from torch import Tensor

from vlm.decoding.constraints import Rules


class Texts:
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
        self.begin(torch.arange(rows, device=device))

    def begin(self, rows: Tensor) -> None:
        self.tokens[rows] = -1
        self.tokens[rows, :, 0] = self.bos_id
        self.lengths[rows] = 1

    def append(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Adds a token to each text: tokens (R, G); parents (R, G) or None are the beams that they follow."""
        if parents is not None:
            self.tokens = self.tokens.gather(1, parents[..., None].expand_as(self.tokens))
        self.tokens.scatter_(2, self.lengths.expand(-1, tokens.shape[1], 1), tokens[..., None])
        # Texts that have ended go on until others take their rows: their tokens pile up in the place never read.
        self.lengths = (self.lengths + 1).clamp(max=self.tokens.shape[2] - 1)

    def select(self, rows: Tensor) -> None:
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]

    def rule(self, scores: Tensor, eos_id: int) -> Tensor:
        """Scores (R * G, V) after the rules; changes its argument."""
        beams = self.tokens.shape[1]
        lengths = self.lengths.expand(-1, beams, 1).reshape(-1)
        return self.rules.apply(scores, self.tokens[:, :, :-1].flatten(0, 1), lengths, eos_id=eos_id)
