"""Small decoders whose texts differ from image to image."""

from collections.abc import Callable

import pytest
import torch

from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.models.fusion import Prefix


@pytest.fixture(params=["cross", pytest.param("prefix", marks=pytest.mark.slow)])
def fusion(request) -> Callable:
    """Options of a decoder of width 16 that takes context of width 6."""
    made = {"cross": lambda: {"context_dim": 6}, "prefix": lambda: {"prefix": Prefix(dim=16, context_dim=6)}}
    return made[request.param]


@pytest.fixture
def make_decoder(scramble, fusion) -> Callable:
    """Builds a random decoder; `sharpness` says how far apart the probabilities of tokens are."""

    def make(vocab_size, max_len, *, sharpness=1.0, context=True, **options):
        sizes = {"dim": 16, "depth": 2, "num_heads": 2, **(fusion() if context else {})}
        model = scramble(Decoder(vocab_size=vocab_size, max_len=max_len, **sizes | options))
        if hasattr(model.positions, "weight") and model.positions.weight.ndim == 2:
            model.positions.weight.data *= 4  # or a random model with tied embeddings repeats one token
        model.token_embed.weight.data *= sharpness
        return model

    return make


@pytest.fixture
def make_context() -> Callable:
    def make(rows, *, masked=True):
        mask = torch.arange(5) < torch.randint(3, 6, (rows, 1))
        return Context(torch.randn(rows, 5, 6), mask if masked else None)

    return make


def image(context: Context, place: int) -> Context:
    mask = None if context.mask is None else context.mask[place : place + 1]
    return Context(context.states[place : place + 1], mask)
