"""A text whose keys and values are kept between readings, as a conversation is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlm.models.context import PLACE
from vlm.models.decoder import Decoder
from vlm.nn.attention import changing_lengths
from vlm.nn.step.state import DecodeState

ROOM = 256  # the cache grows by multiples of this


class KeptText:
    """A text that a decoder has read. Of another one it reads what comes after their common beginning.

    Args:
        decoder: Without context, or with a causal prefix of counted positions.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._read: list[int] = []
        self._state: DecodeState | None = None

    @torch.inference_mode()
    def logits(self, text: Sequence[int], states: Tensor | None = None) -> Tensor:
        """Logits of the token after a text: float32 (1, V).

        Args:
            text: Ids of its tokens, at least one; where a state stands, a negative number: another one for each image,
                which the next texts have too.
            states: The states that stand in it, one after another; they may be left out where no new one stands there.
        Shapes:
            states (number of places, context_dim)
        """
        known = self._common(text)
        state = self._state
        if state is None:
            state = self._state = self.decoder.start(None, rows=1, max_len=min(self.decoder.max_len, ROOM))
        state.rewind(known, min(self.decoder.max_len, len(text) + -len(text) % ROOM))
        self._read = self._read[:known]  # should the step fail
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
        """The number of tokens that need not be read again: all but the last, at most."""
        most = min(len(self._read), len(text) - 1)
        if [*text[:most]] == self._read[:most]:  # nearly always
            return most
        return next(place for place in range(most) if text[place] != self._read[place])
