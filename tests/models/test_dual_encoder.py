"""The dual encoder's temperature; CLIP and SigLIP stand in tests/checkpoint/test_dual_folders.py."""

import math

import pytest
import torch
from transformers import CLIPConfig

from vlm.models.dual_encoder import DualEncoder
from vlm.models.text_encoder import TextEncoder
from vlm.models.vit import ViT


def dual(**options):
    encoder = ViT(image_size=24, patch_size=8, dim=24, depth=1, num_heads=3)
    texts = TextEncoder(vocab_size=31, max_len=16, dim=20, depth=2, num_heads=2)
    return DualEncoder(encoder=encoder, text_encoder=texts, embed_dim=12, **options)


def test_the_temperature_starts_as_in_clip_and_keeps_its_bounds():
    model = dual()
    assert model.log_scale.item() == pytest.approx(CLIPConfig().logit_scale_init_value, abs=1e-4)
    for value, scale in ((99.0, 100.0), (-3.0, 1.0), (math.log(20), 20.0)):
        with torch.no_grad():
            model.log_scale.fill_(value)
        model.clamp_scale()
        assert model.scale.item() == pytest.approx(scale)


def test_a_class_token_that_is_not_there_is_asked_for():
    with pytest.raises(ValueError, match="class_token=true"):
        dual(pool="class")
