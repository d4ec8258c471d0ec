"""Texts that share rows: outputs of every model of texts equal those of each text alone."""

import pytest
import torch

from vlm.data.text.inputs import Encoded, Input, input_rows
from vlm.models.decoder import Decoder
from vlm.models.dual_encoder import DualEncoder
from vlm.models.encoder_decoder import TextToText
from vlm.models.masked_language_model import MaskedLanguageModel
from vlm.models.text_classifiers import SequenceClassifier, TokenClassifier
from vlm.models.text_encoder import TextEncoder
from vlm.models.vit import ViT
from vlm.nn.position import LearnedPositionsEachLayer, RelativeBias, RotaryPositions, SinusoidalPositions
from vlm.tasks.span_answering.predict import span_scores

V, MAX_LEN, D, N = 31, 40, 24, 3
BERT = {"pre_norm": False, "embed_norm": True, "token_types": 2, "norm_eps": 1e-12}
VARIANTS = {
    "bert": lambda: BERT,
    "learned": lambda: {"token_types": 2},
    "each_layer": lambda: {"positions": LearnedPositionsEachLayer(head_dim=D // N, max_len=MAX_LEN)},
    "rotary": lambda: {"positions": RotaryPositions(head_dim=D // N), "token_types": 2},
    "relative": lambda: {"positions": RelativeBias(num_heads=N, max_len=4, causal=False)},
    "sinusoidal": lambda: {"positions": SinusoidalPositions(dim=D), "token_types": 2},
}


@pytest.fixture(params=VARIANTS)
def encoder(request):
    return TextEncoder(vocab_size=V, max_len=MAX_LEN, dim=D, depth=2, num_heads=N, **VARIANTS[request.param]())


@pytest.fixture
def texts():
    """Pairs of many lengths, with the places of three tokens each."""
    lengths = torch.randint(4, 30, (20,)).tolist()
    return [
        Input(torch.randint(1, V, (length,)).tolist(), [0] * 2 + [1] * (length - 2), [0, 1, length - 1])
        for length in lengths
    ]


def tags(encoder):
    model = TokenClassifier(encoder=encoder, num_classes=3)
    return model, lambda rows: model(rows.tokens, rows.segments, rows.types, rows.places)


def classes(pool):
    def build(encoder):
        model = SequenceClassifier(encoder=encoder, num_classes=3, pool=pool, pool_heads=2, transform=False)
        return model, lambda rows: model(rows.tokens, rows.segments, rows.types, rows.layout)

    return build


def masked_words(encoder):
    model = MaskedLanguageModel(encoder=encoder, vocab_size=V, bias=True, transform="gelu")
    return model, lambda rows: model.head.logits(model(rows.tokens, rows.segments, rows.types, rows.places))


def translations(encoder):
    decoder = Decoder(vocab_size=V, max_len=8, dim=D, depth=1, num_heads=N, context_dim=D)
    model, tokens = TextToText(encoder=encoder, decoder=decoder), torch.randint(V, (1, 3))

    def hidden(rows):
        return model(rows.tokens, tokens.expand(len(rows.counts), -1), None, rows.segments, rows.types, rows.layout)

    return model, hidden


def embeddings(encoder):
    image = ViT(image_size=8, patch_size=4, dim=8, depth=1, num_heads=2)
    model = DualEncoder(encoder=image, text_encoder=encoder, embed_dim=6)
    return model, lambda rows: model.embed_texts(rows.tokens, rows.segments, rows.places)


MODELS = {pool: classes(pool) for pool in ("class", "mean", "attention", "class_mean")}
MODELS |= {build.__name__: build for build in (tags, masked_words, translations, embeddings)}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_outputs_of_texts_in_shared_rows_are_those_of_each_alone(scramble, encoder, texts, name):
    model, output = MODELS[name](encoder)
    scramble(model).double()
    if name == "embeddings":
        texts = [text._replace(types=[0] * len(text.ids), places=[0]) for text in texts]
    rows = input_rows([Encoded([text]) for text in texts], 0)
    assert rows.layout is not None and len(rows.tokens) < len(texts)
    alone = torch.cat([output(input_rows([Encoded([text])], 0)) for text in texts])
    torch.testing.assert_close(output(rows), alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_spans(scramble, encoder, texts):
    model = scramble(TokenClassifier(encoder=encoder, num_classes=2)).double()
    rows = input_rows([Encoded([text]) for text in texts], 0)
    shared = span_scores(model, rows)
    for text, scores in zip(texts, shared, strict=True):
        alone = span_scores(model, input_rows([Encoded([text])], 0))[0]
        length = len(text.ids)
        torch.testing.assert_close(scores[:length], alone[:length], rtol=0, atol=1e-5)
        assert (scores[length:] == -torch.inf).all() and (scores[[0, 1, length - 1]] > -torch.inf).all()
