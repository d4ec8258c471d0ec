"""The masked language model: a text encoder that predicts masked tokens."""

from dataclasses import replace

from torch import Tensor, nn

from vlm.errors import Injected
from vlm.models.flop import Flop
from vlm.models.heads import VocabularyHead
from vlm.models.recurrent import RecurrentEncoder
from vlm.models.text_encoder import TextEncoder
from vlm.nn.blocks import Activation
from vlm.nn.image_size import ImageSize
from vlm.nn.vocabulary_loss import Head


class MaskedLanguageModel(nn.Module):
    """Encodes a text with masked tokens and returns the states that the head predicts them from (Devlin et al. 2019).

    The head is tied to the token embedding.

    Args:
        encoder: The text encoder.
        vocab_size: Size V of the tokenizer's vocabulary.
        bias, transform, norm_eps: See VocabularyHead; BERT has a bias and transform=gelu.
    Shapes:
        tokens (B, L), segments (B, L) or None, types (B, L) or None, places (T,): indices in the flattened rows -> (T,
        D)
    """

    def __init__(
        self,
        *,
        encoder: TextEncoder | RecurrentEncoder,
        vocab_size: Injected[int],
        bias: bool = False,
        transform: Activation | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        own = {"bias": bias, "transform": transform, "norm_eps": norm_eps}
        self.vocabulary_head = VocabularyHead(dim=encoder.dim, vocab_size=vocab_size, **own)  # type: ignore[arg-type]

    @property
    def head(self) -> Head:
        """Weights and transform of the head, for the loss."""
        return self.vocabulary_head.parts(self.encoder.token_embed.weight)

    def forward(self, tokens: Tensor, segments: Tensor | None, types: Tensor | None, places: Tensor) -> Tensor:
        return self.encoder(tokens, segments, types).states.flatten(0, 1).index_select(0, places)

    def flop(self, image_size: ImageSize = 0) -> Flop:
        own = sum(weight.numel() for weight in self.vocabulary_head.parameters() if weight.dim() > 1)
        return replace(self.encoder.flop(), head=2 * (self.encoder.token_embed.weight.numel() + own))
