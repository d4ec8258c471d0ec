"""The count of operations against torch's own, which sees every product that is computed."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vlm.models.classifier import Classifier
from vlm.models.decoder import Decoder
from vlm.models.dual_encoder import DualEncoder
from vlm.models.encoder_decoder import TextAndImageToText, TextToText, VisionLanguageModel
from vlm.models.flop import Flop, Work, model_flop
from vlm.models.frozen_features import Features
from vlm.models.fusion import Prefix
from vlm.models.heads import VocabularyHead
from vlm.models.neural_lm import NeuralLanguageModel
from vlm.models.recurrent import RecurrentDecoder, RecurrentEncoder
from vlm.models.several_images import SeveralImages
from vlm.models.soft_attention import BahdanauDecoder, ShowAttendTellDecoder
from vlm.models.text_classifiers import SequenceClassifier, TokenClassifier
from vlm.models.text_encoder import TextEncoder
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT
from vlm.nn.stems import ConvPoolStem, ConvStem

STEMS = {"patches": lambda: None, "conv": lambda: ConvStem(patch_size=8, dim=24)}
STEMS["pool"] = lambda: ConvPoolStem(patch_size=8, dim=24)


def vit(*, stem: str = "patches", **options) -> ViT:
    sizes = {"image_size": 32, "patch_size": 8, "dim": 24, "depth": 3, "num_heads": 3}
    return ViT(stem=STEMS[stem](), **sizes, **options)


def decoder(**options) -> Decoder:
    sizes = {"vocab_size": 50, "max_len": 16, "dim": 20, "depth": 2, "num_heads": 2}
    return Decoder(**sizes | options)


@sdpa_kernel(SDPBackend.MATH)
def counted(step) -> int:
    """As torch counts; in plain products, for its count of the CPU's fused attention came only after 2.11."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def whole(flop: Flop, work: Work, predicted: int) -> float:
    return sum(flop.forward(work, predicted).values())


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
    flop = model_flop(model, image_size=32)
    images = torch.zeros(5, 3, 32, 32)
    assert whole(flop, Work(images=5), 5) == counted(lambda: model(images))


CAPTIONERS = {
    "cross": lambda: {"context_dim": 24},
    "swiglu": lambda: {"context_dim": 24, "activation": "swiglu"},
    "wide heads": lambda: {"context_dim": 24, "head_dim": 6},
    "prefix": lambda: {"prefix": Prefix(dim=20, context_dim=24)},
    "prefix of its own width": lambda: {"dim": 24, "prefix": Prefix(dim=24, context_dim=24)},
    "own head": lambda: {"context_dim": 24, "vocabulary_head": VocabularyHead(dim=20, vocab_size=50, tied=False)},
    "transform": lambda: {
        "context_dim": 24,
        "vocabulary_head": VocabularyHead(dim=20, vocab_size=50, transform="gelu"),
    },
}


PLAIN = ("cross", "prefix")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in CAPTIONERS if name not in PLAIN]


@pytest.mark.parametrize("options", [*PLAIN, *OTHERS])
def test_a_captioner(options) -> None:
    text = decoder(**CAPTIONERS[options]())
    model = VisionLanguageModel(encoder=vit(), decoder=text).eval()
    tokens, segments = torch.zeros(5, 11, dtype=torch.long), torch.ones(5, 11, dtype=torch.long)
    predicted = torch.zeros(40, text.token_embed.embedding_dim)

    def step() -> None:
        model(torch.zeros(5, 3, 32, 32), tokens, segments)
        model.head(predicted)

    assert whole(model_flop(model, image_size=32), Work(5, 5, 11), 40) == counted(step)


def test_a_language_model() -> None:
    model = decoder()
    tokens = torch.zeros(4, 13, dtype=torch.long)
    found = model_flop(model).forward(Work(0, 4, 13), 52)
    assert sum(found.values()) == counted(lambda: model.head(model(tokens)))
    assert found["encoder"] == 0 and found["head"] == 2 * 20 * 50 * 52


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu", "token_types": 2}], ids=str)
def test_classifiers_of_texts_and_of_words(options) -> None:
    encoder = TextEncoder(vocab_size=50, max_len=16, dim=24, depth=2, num_heads=3, **options)
    tokens, segments = torch.zeros(4, 13, dtype=torch.long), torch.ones(4, 13, dtype=torch.long)
    texts, words = (kind(encoder=encoder, num_classes=7).eval() for kind in (SequenceClassifier, TokenClassifier))
    work, places = Work(0, 4, 13), torch.arange(20)
    assert whole(model_flop(texts), work, 4) == counted(lambda: texts(tokens, segments))
    assert whole(model_flop(words), work, 20) == counted(lambda: words(tokens, segments, None, places))


@pytest.mark.parametrize("pool", ["mean", "attention"])
def test_a_dual_encoder(pool) -> None:
    texts = TextEncoder(vocab_size=50, max_len=16, dim=20, depth=2, num_heads=2)
    model = DualEncoder(encoder=vit(), text_encoder=texts, embed_dim=9, pool=pool).eval()
    tokens, segments = torch.zeros(5, 13, dtype=torch.long), torch.ones(5, 13, dtype=torch.long)
    images, places = torch.zeros(5, 3, 32, 32), torch.arange(5) * 13
    work = Work(images=5, rows=5, length=13)
    assert whole(model_flop(model, image_size=32), work, 5) == counted(lambda: model(images, tokens, segments, places))


def test_other_encoders_are_measured() -> None:
    encoder = TimmEncoder(name="resnet18", dim=24, image_size=64)
    model = VisionLanguageModel(encoder=encoder, decoder=decoder(context_dim=24)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    encoder.train().backbone.eval()
    flop = model_flop(model, image_size=64)
    assert flop.image == counted(lambda: encoder(torch.zeros(1, 3, 64, 64)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert encoder.training and not any(part.training for part in encoder.backbone.modules())


def test_features_that_were_kept_are_only_projected() -> None:
    encoder = TimmEncoder(name="resnet18", dim=24, image_size=64)
    encoder.backbone.requires_grad_(False)
    model = VisionLanguageModel(encoder=encoder, decoder=decoder(context_dim=24))
    tokens, segments = torch.zeros(5, 11, dtype=torch.long), torch.ones(5, 11, dtype=torch.long)
    features = Features(torch.zeros(5, 4, 512))
    forward = model_flop(model, image_size=64).forward(Work(5, 5, 11, kept=True), 0)
    assert sum(forward.values()) == counted(lambda: model(features, tokens, segments))
    flop = model_flop(model, image_size=64)
    kept, made = (flop.training(Work(5, kept=kept), 0) for kept in (True, False))
    assert kept == 3 * 2 * 5 * 4 * 512 * 24  # the projection learns
    assert made - kept == 5 * counted(lambda: encoder.features(torch.zeros(1, 3, 64, 64)))  # once, for it does not


def test_a_training_step_is_three_forward_passes() -> None:
    """All but what no gradient goes through: the first layer's input, and a frozen encoder.

    Fused attention computes its weights again in the backward pass, which is no work of the model's.
    """
    model = decoder(context_dim=24)
    captioner = VisionLanguageModel(encoder=vit(), decoder=model)
    work, tokens = Work(5, 5, 11), torch.zeros(5, 11, dtype=torch.long)

    def step() -> None:
        captioner.head(captioner(torch.zeros(5, 3, 32, 32), tokens)).sum().backward()

    first = 2 * 5 * 16 * 24 * 3 * 8 * 8  # of the patches' embedding, whose input is the image
    assert model_flop(captioner, image_size=32).training(work, 55) - first == counted(step)
    captioner.encoder.requires_grad_(False)
    states = 2 * 5 * 16 * 24 * 2 * 20 * 2  # their gradient, of both blocks, goes nowhere
    assert model_flop(captioner, image_size=32).training(work, 55) - states == counted(step)


def test_models_of_other_kinds_are_not_counted() -> None:
    with pytest.raises(TypeError, match="Linear"):
        model_flop(torch.nn.Linear(2, 2))


def test_a_text_with_its_image() -> None:
    encoder = TextEncoder(vocab_size=50, max_len=16, dim=24, depth=3, num_heads=3, token_types=None)
    model = TextAndImageToText(encoder=encoder, image_encoder=vit(), decoder=decoder(context_dim=24)).eval()
    texts, tokens = torch.zeros(5, 7, dtype=torch.long), torch.zeros(5, 11, dtype=torch.long)

    @sdpa_kernel(SDPBackend.MATH)
    def step() -> None:
        model.head(model(texts, tokens, images=torch.zeros(5, 3, 32, 32)))

    assert whole(model_flop(model, image_size=32), Work(5, 5, 11, 7), 55) == counted(step)


def test_several_images_of_a_record() -> None:
    encoder = SeveralImages(encoder=vit(), dim=24, count=2)
    model = VisionLanguageModel(encoder=encoder, decoder=decoder(context_dim=24)).eval()
    tokens = torch.zeros(5, 11, dtype=torch.long)

    def step() -> None:
        model.head(model(torch.zeros(5, 2, 3, 32, 32), tokens))

    assert whole(model_flop(model, image_size=32), Work(5, 5, 11), 55) == counted(step)


def test_text_to_text() -> None:
    encoder = TextEncoder(vocab_size=50, max_len=16, dim=24, depth=3, num_heads=3, token_types=None)
    model = TextToText(encoder=encoder, decoder=decoder(context_dim=24))
    texts, tokens = torch.zeros(5, 7, dtype=torch.long), torch.zeros(5, 11, dtype=torch.long)
    work = Work(rows=5, length=11, read=7)

    @sdpa_kernel(SDPBackend.MATH)
    def step() -> torch.Tensor:
        return model.head(model(texts, tokens)).sum()

    assert whole(model_flop(model), work, 55) == counted(step)
    assert model_flop(model).training(work, 55) == counted(lambda: step().backward())


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


@pytest.mark.parametrize("name", FORERUNNERS)
def test_forerunners(name: str) -> None:
    model = FORERUNNERS[name]()
    texts, tokens = torch.zeros(5, 7, dtype=torch.long), torch.zeros(5, 11, dtype=torch.long)
    work, bridge = Work(rows=5, length=11), 0
    if model.takes_context:
        model = TextToText(encoder=RecurrentEncoder(vocab_size=50, max_len=16, dim=24, depth=2), decoder=model)
        work = Work(rows=5, length=11, read=7)
        bridge = 5 * 2 * sum(layer.weight.numel() for layer in model.decoder.bridge.projections)

    def step() -> None:
        model.head(model(texts, tokens) if bridge else model(tokens))

    with torch.backends.mkldnn.flags(enabled=False):  # whose recurrent layers torch does not count
        assert whole(model_flop(model), work, 55) + bridge == counted(step)
