"""The joined model against Hugging Face's, and gradients of every model there is."""

import importlib
import pkgutil
from functools import partial

import pytest
import torch
from torch import nn

import vlm.models
from vlm.data.batch import Targets, next_token_labels, pack
from vlm.decoding.loop import decode_batch
from vlm.decoding.options import Decoding
from vlm.errors import UserError
from vlm.models.classifier import AttentionPool, Classifier, SequenceClassifier, TokenClassifier
from vlm.models.context import Context, Prefix
from vlm.models.decoder import Decoder, TextDecoder
from vlm.models.dual_encoder import DualEncoder
from vlm.models.encoder_decoder import (
    LinearProjector,
    MLPProjector,
    ProjectedEncoder,
    TextAndImageToText,
    TextToText,
    VisionLanguageModel,
)
from vlm.models.heads import VocabularyHead
from vlm.models.image_decoder import ImageTokenDecoder, TextToImage
from vlm.models.neural_lm import NeuralLanguageModel
from vlm.models.recurrent import BahdanauDecoder, Bridge, RecurrentDecoder, RecurrentEncoder, ShowAttendTellDecoder
from vlm.models.text_encoder import MaskedLanguageModel, TextEncoder
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import SeveralImages, ViT
from vlm.models.word_encoder import WordConvolution, WordEncoder
from vlm.nn.embeddings import Spelling
from vlm.nn.grid_position import WrittenGridPositions
from vlm.training.step.losses import token_loss

V, D, MAX_LEN = 31, 24, 20
TOKENS = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(0))
CELLS = torch.randint(V - 1, (2, 12), generator=torch.Generator().manual_seed(0))  # tokens of images of 3 x 4 cells
SEGMENTS = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 2, 2, 2, 3, 3, 3]])


def vit(**options):
    return ViT(**{"image_size": 24, "patch_size": 8, "dim": D, "depth": 2, "num_heads": 3} | options)


def decoder(context_dim=D, **options):
    sizes = {"vocab_size": V, "max_len": MAX_LEN, "dim": D, "depth": 2, "num_heads": 3}
    return Decoder(**sizes, context_dim=context_dim, **options)


def image_tokens():
    positions = WrittenGridPositions(dim=D, head_dim=8, image_size=(12, 16), patch_size=4)
    return ImageTokenDecoder(num_codes=V - 1, positions=positions, dim=D, depth=2, num_heads=3, context_dim=D)


def text_encoder(**options):
    return TextEncoder(vocab_size=V, max_len=MAX_LEN, dim=D, depth=2, num_heads=3, **options)


def dual(pool):
    return lambda: DualEncoder(
        encoder=vit(class_token=pool == "class"), text_encoder=text_encoder(), embed_dim=7, pool=pool, pool_heads=2
    )


def recurrent(kind, *, context_dim=D, **options):
    return lambda: kind(vocab_size=V, max_len=MAX_LEN, dim=D, context_dim=context_dim, **options)


def recurrent_encoder(**options):
    return lambda: RecurrentEncoder(vocab_size=V, max_len=MAX_LEN, dim=D, depth=2, **options)


def make_classifier(pool):
    return Classifier(encoder=vit(class_token=pool == "class"), num_classes=5, pool=pool)


SHUFFLED = {"context_dim": 7, "dim": D, "shuffle": 2, "bias": False}
WIDE = {"context_dim": D, "dim": D}


def word_encoder():
    spelling = Spelling(vocab_size=V, dim=D, width=8, byte_dim=4)
    spelling.learn([bytes([32 if id % 4 == 0 else 97 + id]) for id in range(V)])  # every fourth token begins a word
    return WordEncoder(max_len=MAX_LEN, dim=D, depth=2, spelling=spelling, affixes=2, buckets=16)


BUILDERS = {
    "ViT": [vit],
    "Decoder": [lambda: decoder(None)],
    "TextEncoder": [text_encoder, lambda: text_encoder(token_types=2)],
    "TextDecoder": [],  # the base of Decoder and of the next
    "HiddenStateDecoder": [],  # the base of all below
    "NeuralLanguageModel": [lambda: NeuralLanguageModel(vocab_size=V, max_len=MAX_LEN, order=4, embed_dim=5, dim=D)],
    "RecurrentDecoder": [
        recurrent(RecurrentDecoder, context_dim=None, depth=2),
        recurrent(RecurrentDecoder, cell="gru"),
    ],
    "SoftAttentionDecoder": [],  # the base of the next two
    "BahdanauDecoder": [recurrent(BahdanauDecoder, attention_dim=5)],
    "ShowAttendTellDecoder": [recurrent(ShowAttendTellDecoder, attention_dim=5)],
    "RecurrentEncoder": [recurrent_encoder(), recurrent_encoder(cell="gru", directions="backward", token_types=2)],
    "Bridge": [lambda: Bridge(context_dim=7, dim=D, count=1, source="mean")],
    "EncoderDecoder": [],  # the base of the next two
    "VisionLanguageModel": [lambda: VisionLanguageModel(encoder=vit(), decoder=decoder())],
    "TextToText": [
        lambda: TextToText(encoder=text_encoder(), decoder=decoder()),
        lambda: TextToText(encoder=recurrent_encoder()(), decoder=recurrent(RecurrentDecoder, source="both")()),
    ],
    "ImageTokenDecoder": [image_tokens],
    "TextToImage": [lambda: TextToImage(encoder=text_encoder(), decoder=image_tokens())],
    "TextAndImageToText": [lambda: TextAndImageToText(encoder=text_encoder(), image_encoder=vit(), decoder=decoder())],
    "SeveralImages": [lambda: SeveralImages(encoder=vit(), dim=D, count=2)],
    "WordEncoder": [word_encoder],
    "WordConvolution": [lambda: WordConvolution(dim=D, dropout=0.0)],
    "DualEncoder": [dual("mean"), dual("class"), dual("attention")],
    "Classifier": [partial(make_classifier, pool) for pool in ("mean", "class", "attention")],
    "PoolingClassifier": [],  # the base of Classifier and of the next
    "SequenceClassifier": [lambda: SequenceClassifier(encoder=text_encoder(), num_classes=3, transform=True)],
    "TokenClassifier": [lambda: TokenClassifier(encoder=text_encoder(), num_classes=3)],
    "AttentionPool": [lambda: AttentionPool(dim=D, num_heads=4)],
    "MaskedLanguageModel": [
        lambda: MaskedLanguageModel(encoder=text_encoder(), vocab_size=V, bias=True, transform="gelu")
    ],
    "Prefix": [lambda: Prefix(dim=D, context_dim=7, norm=True)],
    "LinearProjector": [lambda: LinearProjector(context_dim=7, dim=D), lambda: LinearProjector(**SHUFFLED)],
    "MLPProjector": [lambda: MLPProjector(context_dim=7, dim=D)],
    "ProjectedEncoder": [
        lambda: ProjectedEncoder(backbone=vit(class_token=True), projector=MLPProjector(**WIDE), dim=D, drop=1)
    ],
    "VocabularyHead": [lambda: VocabularyHead(dim=D, vocab_size=V, tied=False, bias=True, transform="gelu")],
    "TimmEncoder": [
        partial(TimmEncoder, name=name, dim=D, image_size=32)
        for name in ("resnet10t", "test_vit", "test_efficientnet_ln", "test_convnext")
    ],
}
CASES = [pytest.param(build, id=f"{name}-{n}") for name, builds in BUILDERS.items() for n, build in enumerate(builds)]


def models():
    """Every module class that a file of vlm.models defines."""
    for file in pkgutil.iter_modules(vlm.models.__path__, "vlm.models."):
        if file.name == "vlm.models.graphs":  # functions of the others
            continue
        module = importlib.import_module(file.name)
        yield from (
            name
            for name, found in vars(module).items()
            if isinstance(found, type) and issubclass(found, nn.Module) and found.__module__ == file.name
            if not name.startswith("_")
        )


def output(model):
    """What a model makes of random images, of tokens, or of both."""
    if isinstance(model, Prefix | LinearProjector | MLPProjector):
        return model(torch.randn(2, 16, 7))
    if isinstance(model, VocabularyHead):
        return model.parts(torch.randn(V, D)).logits(torch.randn(2, 5, D))
    if isinstance(model, MaskedLanguageModel):
        return model.head.logits(model(TOKENS, SEGMENTS, None, torch.arange(4)))
    if isinstance(model, ImageTokenDecoder):
        return model.head(model(model.shift(CELLS), None, Context(torch.randn(2, 7, D))))
    if isinstance(model, TextToImage):
        return model(TOKENS, CELLS, SEGMENTS)
    if isinstance(model, TextDecoder):
        context = Context(torch.randn(2, 7, D)) if model.takes_context else None
        return model.head(model(TOKENS, SEGMENTS, context))
    if isinstance(model, Bridge):
        return torch.stack(model(Context(torch.randn(2, 16, 7))))
    if isinstance(model, TextAndImageToText):
        return model(TOKENS, TOKENS, SEGMENTS, SEGMENTS, images=torch.randn(2, 3, 24, 24))
    if isinstance(model, SeveralImages):
        return model(torch.randn(3, 2, 3, 24, 24)).states
    if isinstance(model, TextToText):
        return model(TOKENS, TOKENS, SEGMENTS, SEGMENTS)
    if isinstance(model, SequenceClassifier | TokenClassifier):
        return model(TOKENS, SEGMENTS)
    if isinstance(model, TextEncoder | RecurrentEncoder):
        return model(TOKENS, SEGMENTS, TOKENS % 2).states
    if isinstance(model, WordEncoder):
        return model(TOKENS, SEGMENTS).states
    if isinstance(model, WordConvolution):
        return model(torch.randn(7, D), torch.tensor([False, True, True, False, True, True, True]))
    if isinstance(model, VisionLanguageModel):
        return model(torch.randn(2, 3, 24, 24), TOKENS, SEGMENTS)
    if isinstance(model, DualEncoder):
        images, texts, scale = model(torch.randn(2, 3, 24, 24), TOKENS, SEGMENTS, torch.tensor([0, 4, 9, 12, 15]))
        return scale * images @ texts.T
    if isinstance(model, AttentionPool):
        return model(torch.randn(2, 7, D))
    side = 32 if isinstance(model, TimmEncoder) else 24
    out = model(torch.randn(2, 3, side, side))
    return out if isinstance(model, Classifier) else out.states


def test_every_model_is_tried_here():
    assert set(models()) == set(BUILDERS)


def test_joined_states_are_the_squares_of_a_rectangle():
    """Of 4 x 8 cells, 2 x 2 neighbours become one: those at the same places of a picture of the cells' numbers."""
    projector = LinearProjector(context_dim=1, dim=4, shuffle=2, image_size=(64, 128))
    projector.fc.weight.data, projector.fc.bias.data = torch.eye(4), torch.zeros(4)
    numbers = torch.arange(32.0).view(4, 8)
    found = projector(numbers.view(1, 32, 1))[0]  # (8, 4)
    squares = [numbers[y : y + 2, x : x + 2].flatten() for y in (0, 2) for x in (0, 2, 4, 6)]
    assert torch.equal(found, torch.stack(squares))
    with pytest.raises(UserError, match="32 states of an image do not form a grid"):
        LinearProjector(context_dim=1, dim=4, shuffle=2)(numbers.view(1, 32, 1))


@pytest.mark.parametrize("build", CASES)
def test_every_parameter_gets_a_gradient(build, scramble):
    model = scramble(build())  # some backbones start with branches that are switched off
    out = output(model)
    assert out.std() > 0.01
    (out * torch.randn_like(out)).sum().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(name.startswith("backbone.") for name, p in model.named_parameters() if name not in trained)
    silent = [name for name, p in trained.items() if p.grad is None or not p.grad.abs().sum() > 0]
    assert trained and not silent


@pytest.mark.parametrize("name, order", [("resnet10t", "bchw"), ("test_mambaout", "bhwc")])
def test_timm_feature_map_becomes_its_cells(name, order):
    encoder = TimmEncoder(name=name, dim=D, image_size=64).eval()
    images = torch.randn(1, 3, 64, 64)
    cells = encoder.backbone.forward_features(images).permute(*map(order.index, "bhwc"))
    assert cells.shape[1:3] == (2, 2)
    truth = torch.stack([encoder.proj(cells[0, y, x]) for y in range(2) for x in range(2)])
    context = encoder(images)
    torch.testing.assert_close(context.states[0], truth, rtol=0, atol=1e-5)
    assert context.mask is None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        *((name, "") for name in ("resnet", "hf-hub:someone/something", "local-dir:/tmp", "../resnet18", "resnet_18")),
        *(("vit_tinyy", "vit_tiny"), ("vit_smal", "vit_small"), ("regnety_00", "regnety_00")),
    ],
)
def test_unknown_timm_backbones_are_refused_and_those_that_begin_alike_are_named(name, near):
    with pytest.raises(UserError, match=r"model\.encoder\.name: timm has no backbone") as fault:
        TimmEncoder(name=name, dim=D, image_size=32)
    if near:
        named = str(fault.value).split("similar names: ")[1].split(", ")
        assert named and all(known.startswith(near) for known in named[:3])  # how many there are differs by version


@pytest.mark.parametrize("content", [None, b"", b"no weights", b"PK\x03\x04"])
def test_timm_weights_that_cannot_be_read_are_named(tmp_path, content):
    path = tmp_path / "local.pth"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot load the file .*local\.pth"):
        TimmEncoder(name="resnet10t", dim=D, image_size=32, weights=str(path))


@pytest.mark.parametrize("written", [decoder, recurrent(RecurrentDecoder), *BUILDERS["ShowAttendTellDecoder"]])
def test_a_batch_without_images_trains(written):
    images = torch.empty(0, 3, 24, 24)
    tokens, segments = pack([], pad_id=0)
    model = VisionLanguageModel(encoder=vit(), decoder=written())
    hidden = model(images, tokens, segments)
    assert hidden.shape == (0, 0, D)
    total, count = token_loss(hidden, Targets.from_labels(next_token_labels(tokens, segments)), model.head_parts)
    total.backward()
    assert (total.item(), count) == (0, 0)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    assert decode_batch(model.decoder, model.encode(images), Decoding(max_tokens=3), bos_id=1, eos_id=2) == []
