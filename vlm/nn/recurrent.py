"""Recurrent layers for texts of different lengths, also several in one row, and additive attention."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vlm.nn.position import segment_positions


class UnpackedTexts(NamedTuple):
    """The texts of some rows, one per row.

    Shapes:
        places (T, M): index of each token in the flattened rows, 0 where `mask` is False; mask (T, M), rows (T,),
        lengths (T,)
    """

    places: Tensor
    mask: Tensor
    rows: Tensor
    lengths: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Unpacks values of tokens: (B, L, ...) -> (T, M, ...)."""
        return x.flatten(0, 1)[self.places]

    def put(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Packs values again into rows of shape (B, L), with zeros for padding: (T, M, ...) -> (B, L, ...)."""
        flat = x.new_zeros(shape.numel(), *x.shape[2:])
        return flat.index_put((self.places[self.mask],), x[self.mask]).unflatten(0, shape)


def unpack_texts(tokens: Tensor, segments: Tensor | None) -> UnpackedTexts:
    """Unpacks the texts of rows; without segments, each row is one text.

    Shapes:
        tokens (B, L), segments (B, L), 0 at padding
    """
    if segments is None:
        segments = torch.ones_like(tokens)
    place, valid = segment_positions(segments), segments != 0
    first = valid & (place == 0)
    number = first.flatten().cumsum(0).view_as(segments) - 1  # index of each token's text
    lengths = torch.bincount(number[valid], minlength=int(first.sum()))
    longest = int(lengths.max()) if len(lengths) else 1  # layers do not accept texts of length 0
    index = lengths.new_zeros(len(lengths), longest)
    flat = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
    index[number[valid], place[valid]] = flat[valid]
    mask = torch.arange(longest, device=tokens.device) < lengths[:, None]
    return UnpackedTexts(index, mask, first.nonzero()[:, 0], lengths)


Cell = Literal["lstm", "gru"]
LAYERS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}
CELLS: dict[str, type[nn.LSTMCell] | type[nn.GRUCell]] = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}


def reverse_texts(x: Tensor, lengths: Tensor) -> Tensor:
    """Reverses each text; padding stays at the end.

    Shapes:
        x (T, M, ...), lengths (T,) -> the same as x
    """
    places = torch.arange(x.shape[1], device=x.device)
    index = torch.where(places < lengths[:, None], lengths[:, None] - 1 - places, places)
    return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand_as(x))


class ScaledEmbedding(nn.Embedding):
    """Token embedding whose matrix can also be the head (Vaswani et al. 2017, section 3.4).

    Inputs have variance 1, the matrix has variance 1 / D.

    Shapes:
        tokens (...) -> (..., D)
    """

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim)
        nn.init.normal_(self.weight, std=dim**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.embedding_dim**0.5


def open_forget_gates(module: nn.Module) -> None:
    """Initialises the forget gates of all LSTMs with a bias of 1 (Jozefowicz et al. 2015)."""
    for part in module.modules():
        if isinstance(part, nn.LSTM | nn.LSTMCell):
            for name, bias in part.named_parameters(recurse=False):
                if name.startswith("bias_ih"):
                    nn.init.ones_(bias.data[part.hidden_size : 2 * part.hidden_size])


class AdditiveAttention(nn.Module):
    """Soft search over states (Bahdanau et al. 2015, appendix A.1.2): e_j = v . tanh(W s + U h_j).

    Args:
        query_dim: Width of the decoder's state s.
        context_dim: Width of the states h.
        dim: Width A of the hidden layer.
    Shapes:
        query (B, G, query_dim), keys (B, S, A), states (B, S, context_dim), mask (B, S) or None ->
        (B, G, context_dim), weights (B, G, S)
    """

    def __init__(self, *, query_dim: int, context_dim: int, dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_dim, dim)
        self.key = nn.Linear(context_dim, dim, bias=False)
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor, states: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.query(query)[:, :, None] + keys[:, None])  # (B, G, S, A)
        scores = self.score(hidden)[..., 0]  # (B, G, S)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        weights = scores.softmax(-1)
        return weights @ states, weights
