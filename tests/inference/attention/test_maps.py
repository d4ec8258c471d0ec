"""Where the model looked: an encoder and decoder whose attention is known."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from vlm.data.images.image import Preprocess
from vlm.data.text.tokenizer import CharTokenizer
from vlm.inference.attention.maps import caption_word_maps, list_missing_maps, read_attention
from vlm.inference.attention.pictures import draw_bands, picture_name
from vlm.models.context import Prefix
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT

SIZE = (16, 40)  # 2 x 5 patches
SEE = Preprocess(image_size=SIZE)


def draw_image(*size):
    return torch.randint(256, (3, *size), dtype=torch.uint8)


@pytest.fixture
def tokenizer():
    return CharTokenizer().fit(["a red circle"])


@pytest.fixture(params=[False, True], ids=["patches", "class token"])
def model(request, scramble, tokenizer):
    encoder = ViT(image_size=SIZE, patch_size=8, dim=12, depth=1, num_heads=3, class_token=request.param)
    sizes = {"vocab_size": tokenizer.vocab_size, "max_len": 32, "dim": 12, "depth": 2, "num_heads": 3}
    return scramble(VisionLanguageModel(encoder=encoder, decoder=Decoder(**sizes, context_dim=12)))


def test_maps_are_the_last_layers_attention_of_the_query_before_each_token(model, tokenizer):
    pixels = draw_image(*SIZE)
    maps = dict(caption_word_maps(model, tokenizer, SEE, pixels, "a red circle"))
    assert list(maps) == ["a", "red", "circle"]

    tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode("a red circle")]])
    context, seen = model.encode(SEE.normalize(pixels[None])), {}
    attn = model.decoder.blocks[-1].cross_attn
    attn.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    model.decoder(tokens, None, context)
    q = attn.q(seen["x"]).unflatten(-1, (3, 4)).transpose(1, 2)
    k = attn.keys_values(context.states)[0]
    weights = (q @ k.transpose(-1, -2) / 2).softmax(-1).mean(1)[0, :, -10:]
    # "a", then " red", then " circle": each token is written by the query before it.
    for word, queries in (("a", [0]), ("red", range(1, 5)), ("circle", range(5, 12))):
        expected = weights[list(queries)].mean(0).reshape(2, 5)
        np.testing.assert_allclose(maps[word], (expected / expected.sum()).detach().numpy(), atol=1e-6)


def test_maps_of_a_prefix_are_the_last_layers_attention_to_its_states(scramble, tokenizer):
    encoder = ViT(image_size=24, patch_size=8, dim=12, depth=1, num_heads=3, class_token=True)
    sizes = {"vocab_size": tokenizer.vocab_size, "max_len": 32, "dim": 12, "depth": 2, "num_heads": 3}
    decoder = Decoder(**sizes, prefix=Prefix(dim=12, context_dim=12))
    model = scramble(VisionLanguageModel(encoder=encoder, decoder=decoder))
    preprocess, pixels = Preprocess(image_size=24), torch.randint(256, (3, 24, 24), dtype=torch.uint8)
    attn, seen = decoder.blocks[-1].attn, {}
    attn.register_forward_pre_hook(lambda _, args: seen.update(x=args[0], mask=args[1]))
    maps = caption_word_maps(model, tokenizer, preprocess, pixels, "a red")
    assert [word for word, _ in maps] == ["a", "red"]
    q, k, _ = attn.qkv(seen["x"]).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)  # each (1, 3, 10 + 5, 4)
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~seen["mask"], -torch.inf)
    weights = scores.softmax(-1).mean(1)[0, 10:, 1:10]  # of the tokens to the patches
    for (_, found), queries in zip(maps, ([0], [1, 2, 3, 4]), strict=True):
        expected = weights[queries].mean(0).reshape(3, 3)
        np.testing.assert_allclose(found, (expected / expected.sum()).detach().numpy(), atol=1e-6)


def test_the_picture_shows_the_image_and_a_copy_a_word(model, tokenizer):
    pixels = torch.full((3, 24, 24), 200, dtype=torch.uint8)
    corner = np.zeros((3, 3))
    corner[0, 0] = 1.0
    with Image.open(io.BytesIO(draw_bands(pixels, [("", [("$a$^$\x7f", corner)])], columns=2))) as picture:
        shown = np.asarray(picture.convert("L"), dtype=float)
    left, right = shown[20:148, 20:148], shown[20:148, 168:296]
    assert np.ptp(left) == 0 and left.mean() == 200  # the image as it is
    assert right[:40, :40].mean() > 150 and right[80:, 80:].mean() < 60  # bright where the model looked alone
    wide = draw_bands(torch.full((3, 8, 32), 200, dtype=torch.uint8), [("", [("a", np.eye(2, 8))])], columns=2)
    with Image.open(io.BytesIO(wide)) as picture:
        assert picture.size == (2 * 128 + 3 * 20, 32 + 2 * 20)


def test_reading_attention_changes_neither_the_model_nor_its_mode(model, tokenizer):
    model.train()
    caption_word_maps(model, tokenizer, SEE, torch.zeros(3, *SIZE, dtype=torch.uint8), "a red")
    assert model.training and model.decoder.blocks[-1].cross_attn.attend.__name__ == "attention"


def test_a_caption_longer_than_the_decoder_is_looked_at_as_far_as_it_goes(model, tokenizer):
    pixels = torch.zeros(3, *SIZE, dtype=torch.uint8)
    assert [word for word, _ in caption_word_maps(model, tokenizer, SEE, pixels, "red " * 20)] == ["red"] * 8


def test_a_caption_is_read_in_the_tokens_that_it_was_written_in(model, tokenizer):
    pixels = draw_image(*SIZE)
    tokens = tokenizer.encode("a red circle")
    read = read_attention(model, tokenizer, SEE, pixels, tokens).words
    maps = caption_word_maps(model, tokenizer, SEE, pixels, "a red circle")
    for (word, weights), (other, others) in zip(read, maps, strict=True):
        assert word == other
        np.testing.assert_array_equal(weights, others)
    full = tokenizer.encode("red " * 8)  # as many tokens as the decoder has places
    assert len(read_attention(model, tokenizer, SEE, pixels, full).words) == 8


def test_maps_of_heads_are_the_encoders_last_layers(model, tokenizer):
    pixels = draw_image(*SIZE)
    attn, seen = model.encoder.blocks[-1].attn, {}
    attn.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    maps = read_attention(model, tokenizer, SEE, pixels, tokenizer.encode("a")).heads
    q, k, _ = attn.qkv(seen["x"]).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)[0]  # (N, S, S)
    rows = weights[:, 0, 1:] if weights.shape[-1] == 11 else weights.mean(1)
    assert [name for name, _ in maps] == ["head 1", "head 2", "head 3"]
    for (_, found), row in zip(maps, rows, strict=True):
        np.testing.assert_allclose(found, (row / row.sum()).detach().reshape(2, 5).numpy(), atol=1e-6)
    assert attn.attend.__name__ == "attention"


@pytest.mark.parametrize(
    "name, words, heads", [("vit_tiny_patch16_224", 2, 3), ("vit_small_patch14_reg4_dinov2", 2, 6), ("resnet10t", 2, 0)]
)
def test_backbones_of_timm_show_what_they_have(tokenizer, name, words, heads):
    side = 56 if "14" in name else 32
    encoder = TimmEncoder(name=name, dim=12, image_size=side).eval()
    decoder = Decoder(vocab_size=tokenizer.vocab_size, max_len=8, dim=12, depth=1, num_heads=3, context_dim=12)
    model, preprocess = VisionLanguageModel(encoder=encoder, decoder=decoder).eval(), Preprocess(image_size=side)
    pixels = torch.randint(256, (3, side, side), dtype=torch.uint8)
    found = read_attention(model, tokenizer, preprocess, pixels, tokenizer.encode("a red"))
    assert (len(found.words), len(found.heads)) == (words, heads)
    for _, weights in (*found.words, *found.heads):
        assert weights.shape[0] == weights.shape[1] and weights.sum() == pytest.approx(1, abs=1e-5)
    missing = list_missing_maps(model, preprocess.normalize(pixels[None]))
    assert len(missing) == (heads == 0) and all("head maps" in line for line in missing)


def test_a_decoder_without_context_has_no_maps_of_words(model, tokenizer):
    model.decoder.blocks[-1].cross_attn = None
    assert "no attention over the image" in list_missing_maps(model, torch.zeros(1, 3, 24, 24))[0]
    found = read_attention(model, tokenizer, SEE, torch.zeros(3, *SIZE), [5])
    assert not found.words and found.heads


def test_pictures_have_names_of_their_own_that_are_safe():
    given = ["a/photo.jpg", "b/photo.jpg", "a/photo.png", "x/..", "../.hidden"]
    given += ["n/\udcff\n*.png", "é" * 300, "photo.jpg"]
    names = [picture_name(path, rank) for path in given for rank in (1, 2)]
    assert len(set(names)) == len(names)
    for name in names:
        assert "/" not in name and not name.startswith(".") and name.isprintable() and len(name.encode()) < 200
    assert picture_name("a/photo.jpg").startswith("photo-") and picture_name("a/photo.jpg", 2).endswith("-2.png")
