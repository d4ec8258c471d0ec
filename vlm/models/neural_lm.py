"""The neural language model over a window of words."""

import torch
from torch import Tensor, nn

from vlm.errors import Count, Injected, Rate
from vlm.models.context import Context
from vlm.models.decoder import HiddenStateDecoder
from vlm.models.flop import Flop
from vlm.models.heads import VocabularyHead
from vlm.nn.dropout import Dropout
from vlm.nn.image_size import ImageSize
from vlm.nn.position import segment_positions
from vlm.nn.step.state import HiddenState, ReadContext


class NeuralLanguageModel(HiddenStateDecoder):
    """Feed-forward language model (Bengio et al. 2003, section 2): y = b + W x + U tanh(d + H x).

    x concatenates the vectors C(w) of the last n - 1 words, with zeros before the beginning of a text. W is the paper's
    optional direct connection.

    Args:
        vocab_size: Size V of the tokenizer's vocabulary.
        max_len: Maximum number of tokens of a segment.
        order: Order n of the n-grams: each word is predicted from n - 1 words.
        embed_dim: Width m of the word vectors C.
        dim: Width h of the hidden layer.
        direct: Whether to also connect words directly to the output.
        dropout: Dropout rate of the hidden layer's input; the paper has none.
    Shapes:
        tokens (B, L), segments (B, L) -> hidden (B, L, h), or with direct (B, L, h + (n - 1) m)
    """

    context_dim = None

    def __init__(
        self,
        *,
        vocab_size: Injected[int],
        max_len: Count,
        order: Count,
        embed_dim: Count,
        dim: Count,
        direct: bool = True,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        if order < 2:
            raise ValueError(
                f"order {order} is invalid; it must be at least 2, because a word is predicted from order - 1 words"
            )
        self.max_len, self.window, self.direct = max_len, order - 1, direct
        self.token_embed = nn.Embedding(vocab_size, embed_dim)
        self.hidden = nn.Linear(self.window * embed_dim, dim)  # H and d of the paper
        width = dim + (self.window * embed_dim if direct else 0)
        self.vocabulary_head = VocabularyHead(dim=width, vocab_size=vocab_size, tied=False, bias=True)
        self.dropout = Dropout(dropout)
        nn.init.normal_(self.token_embed.weight, std=embed_dim**-0.5)
        assert self.vocabulary_head.own is not None
        nn.init.normal_(self.vocabulary_head.own.weight, std=0.5 * width**-0.5)
        nn.init.zeros_(self.vocabulary_head.own.bias)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        context: Context | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states; without segments each row is one text."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if segments is not None:
            places = segment_positions(segments)
        back = torch.arange(self.window, device=tokens.device)  # 0 is the newest word
        index = torch.arange(tokens.shape[1], device=tokens.device)[:, None] - back  # (L, n - 1)
        window = tokens[:, index.clamp(min=0)]  # (B, L, n - 1)
        return self._read(window.masked_fill(places[..., None] < back, -1))

    def _read(self, window: Tensor) -> Tensor:
        """Hidden states after windows of words, newest first, -1 for no word: (..., n - 1) -> (..., width)."""
        vectors = self.token_embed(window.clamp(min=0)) * (window >= 0)[..., None]
        x = self.dropout(vectors.flatten(-2))  # (..., (n - 1) m)
        hidden = torch.tanh(self.hidden(x))
        return torch.cat([hidden, x], -1) if self.direct else hidden

    def flop(self, image_size: ImageSize = 0) -> Flop:
        return Flop(token=2 * self.hidden.weight.numel(), head=2 * self.head_parts.weight.numel())

    def read(self, context: Context | None) -> ReadContext:
        """An empty window; a language model has no context."""
        return ReadContext([], hidden=[torch.full((1, self.window), -1, device=self.token_embed.weight.device)])

    def read_token(self, tokens: Tensor, state: HiddenState) -> tuple[Tensor, list[Tensor]]:
        window = torch.cat([tokens[..., None], state.hidden[0][..., :-1]], -1)  # (B, G, n - 1)
        return self._read(window), [window]
