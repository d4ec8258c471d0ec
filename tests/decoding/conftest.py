"""Small decoders whose texts differ from image to image."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from vlm.models.context import Context, Prefix
from vlm.models.decoder import Decoder
from vlm.models.heads import VocabularyHead
from vlm.models.recurrent import BahdanauDecoder, RecurrentDecoder, ShowAttendTellDecoder

TRANSFORMERS = {"cross": lambda: {"context_dim": 6}, "prefix": lambda: {"prefix": Prefix(dim=16, context_dim=6)}}
FORERUNNERS = {
    "seq2seq": partial(RecurrentDecoder, depth=2, context_dim=6),
    "bahdanau": partial(BahdanauDecoder, attention_dim=7, context_dim=6),
    "show, attend and tell": partial(ShowAttendTellDecoder, attention_dim=7, context_dim=6),
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("prefix", "bahdanau")]
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("seq2seq", "show, attend and tell")]


@pytest.fixture(params=["cross", *SLOW, *NIGHTLY])
def kind(request) -> str:
    """Which decoder of width 16 takes context of width 6."""
    return request.param


@pytest.fixture
def make_decoder(scramble, kind) -> Callable:
    """Builds a random decoder; `sharpness` says how far apart the probabilities of tokens are."""

    def make(vocab_size, max_len, *, sharpness=1.0, context=True, **options):
        if kind in FORERUNNERS:
            # An own head, or a random model with tied embeddings repeats one token.
            head = VocabularyHead(dim=16, vocab_size=vocab_size, tied=False)
            sizes = {"vocab_size": vocab_size, "max_len": max_len, "dim": 16, "vocabulary_head": head}
            model = scramble(FORERUNNERS[kind](**sizes))
            head.own.weight.data *= sharpness
            return model
        sizes = {"dim": 16, "depth": 2, "num_heads": 2, **(TRANSFORMERS[kind]() if context else {})}
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
