"""Encodes the spelling of words by a convolution over their bytes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import Count, Injected, Rate
from vlm.nn.dropout import Dropout

SPACE = b" "
NEVER = 254  # represents bytes from 254 on, which UTF-8 does not have but a vocabulary may
BYTES = NEVER + 2  # number of codes: 0 for no byte, else the byte plus 1
EVEN = 32  # numbers of words and of bytes are rounded up to multiples of 32 and 8, so that few shapes occur


class Spelling(nn.Module):
    """A vector for each token's word, from the UTF-8 bytes of the whole word (CharWNN: dos Santos and Zadrozny 2014).

    A word begins at a token whose bytes begin with a space, at each special token, and at the begin of a text. A
    convolution over the word's bytes, max pooling and a linear layer give the vector, which all tokens of the word
    share. Even a word that does not occur in training has a known ending and capitals.

    Args:
        vocab_size: Size V of the tokenizer's vocabulary.
        dim: Width D of the vectors.
        width: Number of channels of the convolution.
        byte_dim: Width of the byte embedding.
        kernel: Number of bytes that the convolution sees at once.
        longest: Maximum number of bytes of a word; longer words are truncated.
        dropout: Dropout rate of the pooled values.
    Shapes:
        tokens (B, L), positions (L,) or (B, L), 0 where a text begins -> (B, L, D)
    """

    pieces: Tensor
    sizes: Tensor
    begins: Tensor

    def __init__(
        self,
        *,
        vocab_size: Injected[int],
        dim: Count,
        width: Count = 128,
        byte_dim: Count = 32,
        kernel: Count = 5,
        longest: Count = 32,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        self.longest, self.kernel = longest, kernel
        self.register_buffer("pieces", torch.zeros(vocab_size, longest, dtype=torch.uint8))
        self.register_buffer("sizes", torch.zeros(vocab_size, dtype=torch.long))
        self.register_buffer("begins", torch.ones(vocab_size, dtype=torch.bool))
        self.byte_embed = nn.Embedding(BYTES, byte_dim)
        self.convolution = nn.Linear(kernel * byte_dim, width)  # a matrix, as optimisers such as Muon expect
        self.dropout = Dropout(dropout)
        self.project = nn.Linear(width, dim)
        nn.init.normal_(self.project.weight, std=0.5 * (dim * width) ** -0.5)  # about as large as embeddings of tokens

    @torch.no_grad()
    def learn(self, pieces: Sequence[bytes]) -> None:
        """Stores the bytes of all tokens of the vocabulary; those of special tokens are empty."""
        for id, piece in enumerate(pieces):
            known = piece[: self.longest]
            self.pieces[id, : len(known)] = torch.tensor([min(byte, NEVER) + 1 for byte in known], dtype=torch.uint8)
            self.sizes[id], self.begins[id] = len(known), not piece or piece.startswith(SPACE)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        words, owner = self.words(tokens, positions)
        real = (words > 0)[..., None]
        x = F.pad(self.byte_embed(words) * real, (0, 0, self.kernel // 2, (self.kernel - 1) // 2))
        x = x.unfold(1, self.kernel, 1).flatten(2)  # (W, M, byte_dim * kernel)
        x = F.relu(self.convolution(x)) * real
        return self.project(self.dropout(x.amax(1)))[owner]  # (B, L, D)

    def words(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes of the words, 0 after their end, and the index of each token's word.

        Shapes:
            as in forward -> words (W, M), index (B, L); W is B * L and M is `longest`, on a CPU only as large as needed
        """
        begins = (self.begins[tokens] | (positions == 0)).flatten()
        sizes = self.sizes[tokens].flatten()
        owner = begins.cumsum(0) - 1  # (B * L,)
        before = sizes.cumsum(0) - sizes  # bytes of all tokens before
        start = before - torch.where(begins, before, 0).cummax(0).values  # offset of a token in its word
        at = start[:, None] + torch.arange(self.longest, device=tokens.device)  # (B * L, longest)
        pieces = self.pieces[tokens.flatten()].long()
        none = tokens.numel() * self.longest
        place = torch.where((pieces > 0) & (at < self.longest), owner[:, None] * self.longest + at, none)
        words = tokens.new_zeros(none + 1).scatter(0, place.flatten(), pieces.flatten())
        words = words[:none].view(-1, self.longest)
        if tokens.device.type == "cpu":  # elsewhere the host would wait for these sizes
            used, longest = int(owner[-1]) + 1, int((words > 0).sum(1).max())
            words = words[: used + -used % EVEN, : max(8, longest + -longest % 8)]
        return words, owner.view(tokens.shape)
