"""The dual encoder against Hugging Face's CLIP, and texts that lie end to end."""

import math

import pytest
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel

from vlm.data.batch import pack
from vlm.models.context import Context
from vlm.models.dual_encoder import DualEncoder
from vlm.models.text_encoder import TextEncoder
from vlm.models.vit import ViT
from vlm.tasks.contrastive.loss import contrastive_loss

V, D, TEXT_D, E = 31, 24, 20, 12
SIDE = {"hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
IMAGES = {**SIDE, "image_size": 24, "patch_size": 8}
TEXTS = {**SIDE, "hidden_size": TEXT_D, "num_attention_heads": 2, "vocab_size": V, "max_position_embeddings": 16}
TEXTS |= {"bos_token_id": 1, "eos_token_id": 2}


def dual(**options):
    encoder = ViT(image_size=24, patch_size=8, dim=D, depth=1, num_heads=3)
    texts = TextEncoder(vocab_size=V, max_len=16, dim=TEXT_D, depth=2, num_heads=2)
    return DualEncoder(encoder=encoder, text_encoder=texts, embed_dim=E, **options)


class Pooled(nn.Module):
    """An encoder whose pooled states are known."""

    def __init__(self, states):
        super().__init__()
        self.states, self.dim = states, states.shape[1]

    def forward(self, *inputs):
        return Context(self.states[:, None])


def test_logits_and_loss_equal_those_of_clip(scramble):
    config = CLIPConfig(vision_config=IMAGES, text_config=TEXTS, projection_dim=E)
    theirs = scramble(CLIPModel(config))
    tokens, pixels = torch.cat([torch.randint(3, V, (6, 8)), torch.full((6, 1), 2)], 1), torch.randn(6, 3, 24, 24)
    truth = theirs(input_ids=tokens, pixel_values=pixels, return_loss=True)
    sides = theirs.vision_model(pixels).pooler_output, theirs.text_model(tokens).pooler_output
    ours = DualEncoder(encoder=Pooled(sides[0]), text_encoder=Pooled(sides[1]), embed_dim=E)
    ours.image_projection.load_state_dict(theirs.visual_projection.state_dict())
    ours.text_projection.load_state_dict(theirs.text_projection.state_dict())
    with torch.no_grad():
        ours.log_scale.fill_(theirs.logit_scale.item())
    images, texts, scale = ours(pixels, tokens, None, torch.arange(6))
    torch.testing.assert_close(images, truth.image_embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(texts, truth.text_embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(scale * images @ texts.T, truth.logits_per_image, rtol=0, atol=1e-5)
    total, count = contrastive_loss(images, texts, scale)
    torch.testing.assert_close(total / count, truth.loss, rtol=0, atol=1e-5)


def test_the_temperature_starts_as_in_clip_and_keeps_its_bounds():
    model, theirs = dual(), CLIPConfig(vision_config=IMAGES, text_config=TEXTS)
    assert model.log_scale.item() == pytest.approx(theirs.logit_scale_init_value, abs=1e-4)
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
