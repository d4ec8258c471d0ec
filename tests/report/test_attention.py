"""Where the model looked: an encoder and decoder whose attention is known."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from vlm.data.image import Preprocess
from vlm.data.tokenizer import CharTokenizer
from vlm.models.decoder import Decoder
from vlm.models.vision_language import VisionLanguageModel
from vlm.models.vit import ViT
from vlm.report.attention import word_maps
from vlm.report.attention_picture import attention_picture


@pytest.fixture
def tokenizer():
    return CharTokenizer().fit(["a red circle"])


@pytest.fixture(params=[False, True], ids=["patches", "class token"])
def model(request, scramble, tokenizer):
    encoder = ViT(image_size=24, patch_size=8, dim=12, depth=1, num_heads=3, class_token=request.param)
    sizes = {"vocab_size": tokenizer.vocab_size, "max_len": 32, "dim": 12, "depth": 2, "num_heads": 3}
    return scramble(VisionLanguageModel(encoder=encoder, decoder=Decoder(**sizes, context_dim=12)))


def test_maps_are_the_last_layers_attention_of_the_query_before_each_token(model, tokenizer):
    preprocess, pixels = Preprocess(image_size=24), torch.randint(256, (3, 24, 24), dtype=torch.uint8)
    maps = dict(word_maps(model, tokenizer, preprocess, pixels, "a red circle"))
    assert list(maps) == ["a", "red", "circle"]

    tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode("a red circle")]])
    context, seen = model.encode(preprocess.normalize(pixels[None])), {}
    attn = model.decoder.blocks[-1].cross_attn
    attn.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    model.decoder(tokens, None, context)
    q = attn.q(seen["x"]).unflatten(-1, (3, 4)).transpose(1, 2)
    k = attn.keys_values(context.states)[0]
    weights = (q @ k.transpose(-1, -2) / 2).softmax(-1).mean(1)[0, :, -9:]
    # "a", then " red", then " circle": each token is written by the query before it.
    for word, queries in (("a", [0]), ("red", range(1, 5)), ("circle", range(5, 12))):
        expected = weights[list(queries)].mean(0).reshape(3, 3)
        np.testing.assert_allclose(maps[word], (expected / expected.sum()).detach().numpy(), atol=1e-6)


def test_the_picture_shows_the_image_and_a_copy_a_word(model, tokenizer):
    pixels = torch.full((3, 24, 24), 200, dtype=torch.uint8)
    corner = np.zeros((3, 3))
    corner[0, 0] = 1.0
    with Image.open(io.BytesIO(attention_picture(pixels, [("$a$^$\x7f", corner)], columns=2))) as picture:
        shown = np.asarray(picture.convert("L"), dtype=float)
    left, right = shown[20:148, :128], shown[20:148, 148:276]
    assert np.ptp(left) == 0 and left.mean() == 200  # the image as it is
    assert right[:40, :40].mean() > 150 and right[80:, 80:].mean() < 60  # bright where the model looked alone


def test_reading_attention_changes_neither_the_model_nor_its_mode(model, tokenizer):
    model.train()
    word_maps(model, tokenizer, Preprocess(image_size=24), torch.zeros(3, 24, 24, dtype=torch.uint8), "a red")
    assert model.training and model.decoder.blocks[-1].cross_attn.attend.__name__ == "attention"


def test_a_caption_longer_than_the_decoder_is_looked_at_as_far_as_it_goes(model, tokenizer):
    maps = word_maps(
        model, tokenizer, Preprocess(image_size=24), torch.zeros(3, 24, 24, dtype=torch.uint8), "red " * 20
    )
    assert [word for word, _ in maps] == ["red"] * 8
