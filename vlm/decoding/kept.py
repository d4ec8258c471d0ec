"""Keeps a text's keys and values between readings, for conversations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlm.models.context import PLACE
from vlm.models.decoder import Decoder
from vlm.nn.attention import changing_lengths
from vlm.nn.step.state import DecodeState

CACHE_STEP = 256  # the cache grows by multiples of this


class KeptText:
    """Keeps the keys and values of the last text; of a new text, only the part after the common beginning is read.

    Args:
        decoder: A decoder without context, or with a causal prefix whose states have positions.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._read: list[int] = []
        self._state: DecodeState | None = None

    @torch.inference_mode()
    def logits(self, text: Sequence[int], states: Tensor | None = None) -> Tensor:
        """Logits of the token after a text: float32 (1, V).

        Args:
            text: Token ids, at least one, with a negative number in place of each state. Each image has its own number,
                which must be the same in later texts.
            states: All states of the text, in order; may be None if the part that is not kept has none.
        Shapes:
            states (number of states, context_dim)
        """
        known = self._common(text)
        state = self._state
        if state is None:
            state = self._state = self.decoder.start(None, rows=1, max_len=min(self.decoder.max_len, CACHE_STEP))
        state.rewind(known, min(self.decoder.max_len, len(text) + -len(text) % CACHE_STEP))
        self._read = self._read[:known]  # valid even if the step fails
        device = self.decoder.token_embed.weight.device
        new = torch.tensor([text[known:]], device=device)
        laid = None
        if (places := new < 0).any():
            assert states is not None
            before = sum(token < 0 for token in text[:known])
            laid = states.new_zeros(*new.shape, states.shape[-1])
            laid[places] = states[before:]
        with changing_lengths(device):
            hidden = self.decoder.step(new.masked_fill(places, PLACE), state, laid)
            self._read = list(text)
            return self.decoder.head(hidden[:, -1]).float()

    def _common(self, text: Sequence[int]) -> int:
        """Number of tokens that need not be read again; at most all but the last."""
        most = min(len(self._read), len(text) - 1)
        if [*text[:most]] == self._read[:most]:  # the usual case
            return most
        return next(place for place in range(most) if text[place] != self._read[place])
