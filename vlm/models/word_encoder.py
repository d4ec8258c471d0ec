"""A text encoder for small sets of tagged sentences: words, read by their spelling, and convolutions over them."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import Count, Range, Rate
from vlm.models.context import Context
from vlm.models.flop import Flop, count_flop, token_ids
from vlm.nn.dropout import Dropout
from vlm.nn.embeddings import HashedAffixes, Spelling
from vlm.nn.image_size import ImageSize
from vlm.nn.position import segment_positions

MAX_AFFIX = 16  # characters; each costs a pass over all bytes


class WordConvolution(nn.Module):
    """A gated convolution over each word and its two neighbours, as a residual branch (Dauphin et al. 2017).

    Args:
        dim: Width D.
        dropout: Dropout rate of the branch.
    Shapes:
        x (W, D), follows (W,): whether a word is in the same text as the one before it -> (W, D)
    """

    def __init__(self, *, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(3 * dim, 2 * dim)  # a matrix, as optimisers such as Muon expect
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, follows: Tensor) -> Tensor:
        states, follows = self.norm(x), follows[:, None]
        before = F.pad(states[:-1], (0, 0, 1, 0)) * follows
        after = F.pad(states[1:] * follows[1:], (0, 0, 0, 1))
        return x + self.dropout(F.glu(self.linear(torch.cat([before, states, after], -1)), -1))


class WordEncoder(nn.Module):
    """Encodes the words of texts by their spelling and by gated convolutions over neighbouring words.

    The first vector of a word is the normalised sum of those of `spelling` and of its affixes. Tokens only give the
    bytes of words, so the tokenizer does not change the states; all tokens of a word have its state. From few
    sentences, a window of words (Collobert et al. 2011) learns more than attention does.

    Args:
        max_len: Maximum number of tokens of a text.
        dim: Width D.
        depth: Number of convolutions; each adds one word on both sides to what a state depends on.
        spelling: Encodes the bytes of words.
        affixes: Number of characters of the longest beginning and ending of a word that have vectors.
        buckets: Number of these vectors, which affixes with equal hashes share.
        affix_dropout: Probability of leaving out each vector of an affix, or of a word, in training.
        word_dropout: Probability of leaving out the vector of a word once more, because unseen words have none.
        dropout: Dropout rate of the first vectors and of each convolution.
    Shapes:
        tokens (B, L), segments (B, L) or None -> Context, states (B, L, D), mask (B, L) or None
    Raises:
        ValueError: `affixes` is out of range.
    """

    def __init__(
        self,
        *,
        max_len: Count,
        dim: Count,
        depth: Count,
        spelling: Spelling,
        affixes: Annotated[int, Range(0, MAX_AFFIX)] = 4,
        buckets: Count = 8192,
        affix_dropout: Rate = 0.0,
        word_dropout: Rate = 0.0,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        if not 0 <= affixes <= MAX_AFFIX:
            raise ValueError(f"affixes is {affixes}; use 0 to {MAX_AFFIX}")
        self.dim, self.max_len = dim, max_len
        self.spelling = spelling
        self.affixes = HashedAffixes(
            dim=dim, buckets=buckets, longest=affixes, dropout=affix_dropout, word_dropout=word_dropout
        )
        self.norm, self.dropout = nn.LayerNorm(dim), Dropout(dropout)
        self.layers = nn.ModuleList(WordConvolution(dim=dim, dropout=dropout) for _ in range(depth))

    def forward(self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None) -> Context:
        """States of all tokens. Without segments, each row is one text; types are ignored."""
        length = tokens.shape[1]
        if segments is None:
            positions, texts = torch.arange(length, device=tokens.device), torch.zeros_like(tokens)
        else:
            positions, texts = segment_positions(segments), segments
        words, owner = self.spelling.words(tokens, positions)
        texts = texts + (length + 1) * torch.arange(len(tokens), device=tokens.device)[:, None]  # numbers over all rows
        text = owner.new_full((len(words),), -1).scatter(0, owner.flatten(), texts.flatten())  # of each word
        follows = F.pad(text[1:] == text[:-1], (1, 0))
        x = self.dropout(self.norm(self.spelling.embed_words(words) + self.affixes(words)))
        for layer in self.layers:
            x = layer(x, follows)
        return Context(x[owner], None if segments is None else segments != 0)

    def flop(self, image_size: ImageSize = 0) -> Flop:
        """Operations per token as if each token were a word, the most that there can be."""
        return Flop(token=count_flop(self, token_ids(1))[0])
