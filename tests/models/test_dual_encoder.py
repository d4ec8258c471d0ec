"""The dual encoder's temperature, and texts end to end; CLIP stands in tests/checkpoint/test_dual_folders.py."""

import math

import pytest
import torch
from transformers import CLIPConfig

from vlm.data.batch import pack
from vlm.models.dual_encoder import DualEncoder
from vlm.models.text_encoder import TextEncoder
from vlm.models.vit import ViT

V, D, TEXT_D, E = 31, 24, 20, 12


def dual(**options):
    encoder = ViT(image_size=24, patch_size=8, dim=D, depth=1, num_heads=3)
    texts = TextEncoder(vocab_size=V, max_len=16, dim=TEXT_D, depth=2, num_heads=2)
    return DualEncoder(encoder=encoder, text_encoder=texts, embed_dim=E, **options)


def test_the_temperature_starts_as_in_clip_and_keeps_its_bounds():
    model = dual()
    assert model.log_scale.item() == pytest.approx(CLIPConfig().logit_scale_init_value, abs=1e-4)
    for value, scale in ((99.0, 100.0), (-3.0, 1.0), (math.log(20), 20.0)):
        with torch.no_grad():
            model.log_scale.fill_(value)
        model.clamp_scale()
        assert model.scale.item() == pytest.approx(scale)


def test_texts_end_to_end_are_embedded_as_alone(scramble):
    model = scramble(dual())
    texts = [torch.randint(V, (n,)).tolist() for n in (3, 7, 2, 5)]
    tokens, segments = pack([texts[:3], texts[3:]], pad_id=0)
    packed = model.embed_texts(tokens, segments, torch.tensor([0, 3, 10, 12]))
    for text, row in zip(texts, packed, strict=True):
        own = torch.tensor([text])
        (alone,) = model.embed_texts(own, torch.ones_like(own), torch.tensor([0]))
        torch.testing.assert_close(row, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed.norm(dim=1), torch.ones(4))


def test_a_class_token_that_is_not_there_is_asked_for():
    with pytest.raises(ValueError, match="class_token=true"):
        dual(pool="class")
