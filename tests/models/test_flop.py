"""The count of operations against torch's own, which sees every product that is computed."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vlm.models.classifier import Classifier, SequenceClassifier, TokenClassifier
from vlm.models.context import Features, Prefix
from vlm.models.decoder import Decoder
from vlm.models.dual_encoder import DualEncoder
from vlm.models.encoder_decoder import TextAndImageToText, TextToText, VisionLanguageModel
from vlm.models.flop import Work, model_flop
from vlm.models.heads import VocabularyHead
from vlm.models.neural_lm import NeuralLanguageModel
from vlm.models.recurrent import BahdanauDecoder, RecurrentDecoder, RecurrentEncoder, ShowAttendTellDecoder
from vlm.models.text_encoder import TextEncoder
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import SeveralImages, ViT
from vlm.nn.embeddings import ConvPoolStem, ConvStem

STEMS = {"patches": lambda: None, "conv": lambda: ConvStem(patch_size=8, dim=24)}
STEMS["pool"] = lambda: ConvPoolStem(patch_size=8, dim=24)


def vit(*, stem: str = "patches", **options) -> ViT:
    sizes = {"image_size": 32, "patch_size": 8, "dim": 24, "depth": 3, "num_heads": 3}
    return ViT(stem=STEMS[stem](), **sizes, **options)


def decoder(**options) -> Decoder:
    sizes = {"vocab_size": 50, "max_len": 16, "dim": 20, "depth": 2, "num_heads": 2}
    return Decoder(**sizes | options)


@sdpa_kernel(SDPBackend.MATH)
def count_flop(step) -> int:
    """As torch counts; in plain products, for its count of the CPU's fused attention came only after 2.11."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


def reader(**options) -> TextEncoder:
    sizes = {"vocab_size": 50, "max_len": 16, "dim": 24, "depth": 2, "num_heads": 3}
    return TextEncoder(**sizes | options)


def check(model, work: Work, predicted: int, step) -> None:
    """Compares the count of a forward pass with torch's."""
    assert sum(model_flop(model, image_size=32).forward(work, predicted).values()) == count_flop(step)


@pytest.mark.parametrize(
    ("stem", "options"),
    [
        ("patches", {}),
        ("conv", {"class_token": True}),
        ("pool", {"activation": "swiglu", "mlp_ratio": 3.0}),
        ("patches", {"head_dim": 12, "bias": False}),
    ],
)
@pytest.mark.parametrize("pool", ["mean", "attention"])
def test_a_classifier(stem, options, pool) -> None:
    model = Classifier(encoder=vit(stem=stem, **options), num_classes=7, pool=pool).eval()
    check(model, Work(images=5), 5, lambda: model(torch.zeros(5, 3, 32, 32)))


CROSS = {"context_dim": 24}
CAPTIONERS = {
    "cross": lambda: CROSS,
    "prefix": lambda: {"prefix": Prefix(dim=20, context_dim=24)},
    "swiglu": lambda: CROSS | {"activation": "swiglu"},
    "wide heads": lambda: CROSS | {"head_dim": 6},
    "prefix of its own width": lambda: {"dim": 24, "prefix": Prefix(dim=24, context_dim=24)},
    "own head": lambda: CROSS | {"vocabulary_head": VocabularyHead(dim=20, vocab_size=50, tied=False)},
    "transform": lambda: CROSS | {"vocabulary_head": VocabularyHead(dim=20, vocab_size=50, transform="gelu")},
}


@pytest.mark.sample(slow=8)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", CAPTIONERS)
def test_a_captioner(name, several) -> None:
    text = decoder(**CAPTIONERS[name]())
    encoder = SeveralImages(encoder=vit(), dim=24, count=2) if several else vit()
    model = VisionLanguageModel(encoder=encoder, decoder=text).eval()
    images = torch.zeros(5, *([2] if several else []), 3, 32, 32)

    def step() -> None:
        model(images, tokens(5, 11), tokens(5, 11) + 1)
        model.head(torch.zeros(40, text.token_embed.embedding_dim))

    check(model, Work(5, 5, 11), 40, step)


@pytest.mark.slow
def test_a_language_model() -> None:
    model = decoder()
    check(model, Work(0, 4, 13), 52, lambda: model.head(model(tokens(4, 13))))
    found = model_flop(model).forward(Work(0, 4, 13), 52)
    assert found["encoder"] == 0 and found["head"] == 2 * 20 * 50 * 52


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu", "token_types": 2}], ids=str)
def test_classifiers_of_texts_and_of_words(options) -> None:
    kinds, (ids, segments) = (SequenceClassifier, TokenClassifier), (tokens(4, 13), tokens(4, 13) + 1)
    texts, words = (kind(encoder=reader(**options), num_classes=7).eval() for kind in kinds)
    check(texts, Work(0, 4, 13), 4, lambda: texts(ids, segments))
    check(words, Work(0, 4, 13), 20, lambda: words(ids, segments, None, torch.arange(20)))


@pytest.mark.parametrize("pool", ["mean", "attention"])
def test_a_dual_encoder(pool) -> None:
    model = DualEncoder(encoder=vit(), text_encoder=reader(dim=20, num_heads=2), embed_dim=9, pool=pool).eval()
    images, places = torch.zeros(5, 3, 32, 32), torch.arange(5) * 13
    work = Work(images=5, rows=5, length=13)
    check(model, work, 5, lambda: model(images, tokens(5, 13), tokens(5, 13) + 1, places))


@pytest.mark.slow
def test_other_encoders_are_measured() -> None:
    encoder = TimmEncoder(name="resnet18", dim=24, image_size=64)
    model = VisionLanguageModel(encoder=encoder, decoder=decoder(context_dim=24)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    encoder.train().backbone.eval()
    flop = model_flop(model, image_size=64)
    assert flop.image == count_flop(lambda: encoder(torch.zeros(1, 3, 64, 64)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert encoder.training and not any(part.training for part in encoder.backbone.modules())


@pytest.mark.slow
def test_features_that_were_kept_are_only_projected() -> None:
    encoder = TimmEncoder(name="resnet18", dim=24, image_size=64)
    encoder.backbone.requires_grad_(False)
    model = VisionLanguageModel(encoder=encoder, decoder=decoder(context_dim=24))
    features, flop = Features(torch.zeros(5, 4, 512)), model_flop(model, image_size=64)
    forward = flop.forward(Work(5, 5, 11, cached=True), 0)
    assert sum(forward.values()) == count_flop(lambda: model(features, tokens(5, 11), tokens(5, 11) + 1))
    kept, made = (flop.training(Work(5, cached=kept), 0) for kept in (True, False))
    assert kept == 3 * 2 * 5 * 4 * 512 * 24  # the projection learns
    assert made - kept == 5 * count_flop(lambda: encoder.features(torch.zeros(1, 3, 64, 64)))  # once, for it does not


@pytest.mark.slow
def test_a_training_step_is_three_forward_passes() -> None:
    """All but what no gradient goes through: the first layer's input, and a frozen encoder.

    Fused attention computes its weights again in the backward pass, which is no work of the model's.
    """
    captioner, work = VisionLanguageModel(encoder=vit(), decoder=decoder(context_dim=24)), Work(5, 5, 11)

    def step() -> None:
        captioner.head(captioner(torch.zeros(5, 3, 32, 32), tokens(5, 11))).sum().backward()

    first = 2 * 5 * 16 * 24 * 3 * 8 * 8  # of the patches' embedding, whose input is the image
    assert model_flop(captioner, image_size=32).training(work, 55) - first == count_flop(step)
    captioner.encoder.requires_grad_(False)
    states = 2 * 5 * 16 * 24 * 2 * 20 * 2  # their gradient, of both blocks, goes nowhere
    assert model_flop(captioner, image_size=32).training(work, 55) - states == count_flop(step)


def test_models_of_other_kinds_are_not_counted() -> None:
    with pytest.raises(TypeError, match="Linear"):
        model_flop(torch.nn.Linear(2, 2))


@pytest.mark.slow
def test_a_text_with_its_image() -> None:
    encoder = reader(depth=3, token_types=None)
    model = TextAndImageToText(encoder=encoder, image_encoder=vit(), decoder=decoder(context_dim=24)).eval()
    images = torch.zeros(5, 3, 32, 32)
    check(model, Work(5, 5, 11, 7), 55, lambda: model.head(model(tokens(5, 7), tokens(5, 11), images=images)))


@pytest.mark.slow
def test_text_to_text() -> None:
    model = TextToText(encoder=reader(depth=3, token_types=None), decoder=decoder(context_dim=24))
    work = Work(rows=5, length=11, read=7)

    @sdpa_kernel(SDPBackend.MATH)
    def step() -> torch.Tensor:
        return model.head(model(tokens(5, 7), tokens(5, 11))).sum()

    check(model, work, 55, step)
    assert model_flop(model).training(work, 55) == count_flop(lambda: step().backward())


RECURRENT = {"vocab_size": 50, "max_len": 16, "dim": 20}
SOFT = RECURRENT | {"attention_dim": 9, "context_dim": 24}
FORERUNNERS = {
    "window": lambda: NeuralLanguageModel(vocab_size=50, max_len=16, order=4, embed_dim=5, dim=20),
    "lstm": lambda: RecurrentDecoder(**RECURRENT, depth=2),
    "seq2seq": lambda: RecurrentDecoder(**RECURRENT, cell="gru", context_dim=24),
    "bahdanau": lambda: BahdanauDecoder(**SOFT),
    "tell": lambda: ShowAttendTellDecoder(
        **SOFT, vocabulary_head=VocabularyHead(dim=20, vocab_size=50, tied=False, bias=True)
    ),
}


@pytest.mark.sample(plain=2, slow=8)
@pytest.mark.parametrize("name", FORERUNNERS)
def test_forerunners(name: str) -> None:
    model, work, read = FORERUNNERS[name](), Work(rows=5, length=11), ()
    bridge = 0
    if model.takes_context:
        model = TextToText(encoder=RecurrentEncoder(vocab_size=50, max_len=16, dim=24, depth=2), decoder=model)
        work, read = Work(rows=5, length=11, read=7), (tokens(5, 7),)
        bridge = 5 * 2 * sum(layer.weight.numel() for layer in model.decoder.bridge.projections)
    with torch.backends.mkldnn.flags(enabled=False):  # whose recurrent layers torch does not count
        found = sum(model_flop(model).forward(work, 55).values())
        assert found + bridge == count_flop(lambda: model.head(model(*read, tokens(5, 11))))
