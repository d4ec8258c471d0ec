"""The text encoder against torch's own layers, and texts that share rows; tests/checkpoint compare it with BERT."""

import pytest
import torch
from torch import nn

from vlm.data.batch import InputRows
from vlm.data.text.inputs import EncodedSample, Input, input_rows
from vlm.models.classifier import SequenceClassifier, TokenClassifier
from vlm.models.decoder import Decoder
from vlm.models.dual_encoder import DualEncoder
from vlm.models.encoder_decoder import TextToText
from vlm.models.text_encoder import MaskedLanguageModel, TextEncoder
from vlm.models.vit import ViT
from vlm.nn.attention import segment_mask
from vlm.nn.embeddings import Spelling
from vlm.nn.position import (
    BucketedBias,
    LearnedPositionsEachLayer,
    Positions,
    RelativeBias,
    RotaryPositions,
    SinusoidalPositions,
    SplitSinusoids,
)
from vlm.tasks.masked_language_modeling.predict import gap_probabilities, pseudo_log_likelihood
from vlm.tasks.span_answering.predict import span_scores

V, MAX_LEN, D, DEPTH, N, LENGTH = 31, 40, 24, 2, 3, 12
SIZES = {"vocab_size": V, "max_len": MAX_LEN, "dim": D, "depth": DEPTH, "num_heads": N}
BERT = {"pre_norm": False, "embed_norm": True, "token_types": 2, "norm_eps": 1e-12}
VARIANTS = {
    "bert": lambda: BERT,
    "learned": dict,
    "each_layer": lambda: {"positions": LearnedPositionsEachLayer(head_dim=D // N, max_len=MAX_LEN)},
    "rotary": lambda: {"positions": RotaryPositions(head_dim=D // N), "norm": "rms", "activation": "swiglu"},
    "relative": lambda: {"positions": RelativeBias(num_heads=N, max_len=4, causal=False)},
    "sinusoidal": lambda: {"positions": SinusoidalPositions(dim=D), "token_types": 3},
    "marian": lambda: {"positions": SplitSinusoids(dim=D), "embed_scale": D**0.5, "pre_norm": False},
    "t5": lambda: {"positions": BucketedBias(num_heads=N, buckets=8, furthest=5, causal=False), "attn_scale": 1.0},
    "no_positions": lambda: {"positions": Positions()},
    "spelling": lambda: {"spelling": spelling()},
}


def spelling():
    layer = Spelling(vocab_size=V, dim=D, width=8, byte_dim=4)
    layer.learn([b"" if id < 3 else f"{' ' * (id % 2)}{id}".encode() for id in range(V)])
    return layer


# Two rows: texts of 4, 2 and 3 tokens with 3 of padding, and one of 12.
SEGMENTS = torch.tensor([[1, 1, 1, 1, 2, 2, 3, 3, 3, 0, 0, 0], [1] * 12])


@pytest.fixture(params=VARIANTS)
def encoder(request, scramble):
    return scramble(TextEncoder(**SIZES | VARIANTS[request.param]()))


@pytest.fixture
def tokens():
    return torch.randint(V, SEGMENTS.shape)


@pytest.fixture
def types(encoder):
    return None if encoder.type_embed is None else torch.randint(2, SEGMENTS.shape)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("pre_norm", [True, False])
def test_equals_torch(scramble, tokens, pre_norm, activation, bias):
    options = {"dropout": 0.0, "batch_first": True, "norm_first": pre_norm, "activation": activation, "bias": bias}
    layer = nn.TransformerEncoderLayer(D, N, 4 * D, **options)
    last = nn.LayerNorm(D, bias=bias) if pre_norm else None
    theirs = scramble(nn.TransformerEncoder(layer, DEPTH, last, enable_nested_tensor=False))
    ours = scramble(TextEncoder(**SIZES, pre_norm=pre_norm, activation=activation, bias=bias))
    names = {"self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj": "attn.proj", "linear": "mlp.fc"}
    state = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        state[name.replace("layers.", "blocks.")] = tensor
    own = {name: tensor for name, tensor in ours.state_dict().items() if name.startswith(("token", "positions"))}
    ours.load_state_dict(state | own)
    padding = SEGMENTS == 0
    embedded = ours.token_embed(tokens) + ours.positions.weight[:LENGTH]
    truth = theirs(embedded, src_key_padding_mask=padding)
    found = ours(tokens, (~padding).long()).states
    torch.testing.assert_close(found[~padding], truth[~padding], rtol=0, atol=1e-5)


def test_token_dropout_leaves_positions_alone_of_some_tokens_in_training(tokens):
    encoder = TextEncoder(**SIZES, token_dropout=0.5)
    places, own = torch.arange(LENGTH), encoder.positions.weight[:LENGTH]
    whole = encoder.token_embed(tokens) + own
    torch.manual_seed(0)
    found = encoder.embed(tokens, places, None)
    kept, gone = (found == whole).all(-1), (found == own).all(-1)
    assert (kept ^ gone).all() and 4 <= gone.sum() <= 20  # of 24
    assert torch.equal(encoder.eval().embed(tokens, places, None), whole)


def test_every_parameter_gets_a_gradient(encoder, tokens, types):
    encoder(tokens, SEGMENTS, types).states[SEGMENTS != 0].square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_the_mask_of_two_texts_and_padding():
    """Drawn as rows of digits: a 1 where the token of the row attends to that of the column."""
    mask = segment_mask(torch.tensor([[1, 1, 1, 2, 2, 0]]))[0, 0]
    rows = ["".join(str(int(seen)) for seen in row) for row in mask]
    assert rows == ["111000", "111000", "111000", "000110", "000110", "000001"]


def test_the_weights_of_bert_large():
    """24 layers of 12,596,224 weights, of width 1024; 334.6 million with 30,000 words and all embeddings."""
    with torch.device("meta"):
        encoder = TextEncoder(vocab_size=30_000, max_len=512, dim=1024, num_heads=16, depth=24, **BERT)
    assert sum(p.numel() for p in encoder.blocks[0].parameters()) == 12_596_224
    assert round((sum(p.numel() for p in encoder.parameters()) + 1024 * 1025) / 1e5) == 3346
    assert encoder.blocks[0].attn.head_dim == 64


def test_the_pseudo_log_likelihood_masks_one_token_at_a_time(scramble):
    ours = scramble(
        MaskedLanguageModel(encoder=TextEncoder(**SIZES, **BERT), vocab_size=V, bias=True, transform="gelu")
    )
    ids, mask, total = [1, 7, 8, 9, 7, 2], V - 1, 0.0
    ours.double()
    for at in range(1, 5):
        row = torch.tensor([[*ids[:at], mask, *ids[at + 1 :]]])
        rows = InputRows(row, torch.ones_like(row), places=torch.tensor([at]))
        total += gap_probabilities(ours, rows)[0, ids[at]].log().item()
    assert pseudo_log_likelihood(ours, ids, mask_id=mask, device="cpu") == pytest.approx(total, abs=1e-6)
    assert pseudo_log_likelihood(ours, [1, 2], mask_id=mask, device="cpu") == 0


# Texts that share rows


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
    rows = input_rows([EncodedSample([text]) for text in texts], 0)
    assert rows.layout is not None and len(rows.tokens) < len(texts)
    alone = torch.cat([output(input_rows([EncodedSample([text])], 0)) for text in texts])
    torch.testing.assert_close(output(rows), alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_spans(scramble, encoder, texts):
    model = scramble(TokenClassifier(encoder=encoder, num_classes=2)).double()
    rows = input_rows([EncodedSample([text]) for text in texts], 0)
    shared = span_scores(model, rows)
    for text, scores in zip(texts, shared, strict=True):
        alone = span_scores(model, input_rows([EncodedSample([text])], 0))[0]
        length = len(text.ids)
        torch.testing.assert_close(scores[:length], alone[:length], rtol=0, atol=1e-5)
        assert (scores[length:] == -torch.inf).all() and (scores[[0, 1, length - 1]] > -torch.inf).all()
