"""The dual encoder's temperature and pooling; CLIP and SigLIP stand in tests/checkpoint/test_dual_folders.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import CLIPConfig

from vlm.models.dual_encoder import DualEncoder
from vlm.models.graphs import graphs_of
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


def test_the_mean_of_packed_texts_is_that_of_each_alone():
    torch.manual_seed(0)
    model = dual(text_pool="mean").eval()
    texts = [torch.randint(1, 31, (1, length)) for length in (3, 5, 1, 6)]
    tokens = torch.zeros(2, 10, dtype=torch.long)
    segments = torch.zeros_like(tokens)
    for number, (text, (row, begin)) in enumerate(zip(texts, ((0, 0), (0, 3), (1, 0), (1, 1)), strict=True)):
        tokens[row, begin : begin + text.shape[1]] = text
        segments[row, begin : begin + text.shape[1]] = 1 + number
    with torch.no_grad():
        order = [3, 0, 1, 2]
        begins = torch.tensor([0, 3, 10, 11])[order]
        steps, lengths = torch.arange(6), torch.tensor([len(text[0]) for text in texts])[order]
        layout = torch.where(steps < lengths[:, None], begins[:, None] + steps, -1)
        packed = model.embed_texts(tokens, segments, begins, layout)
        states = [model.text_encoder(text, torch.ones_like(text)).states[0].mean(0) for text in texts]
        alone = F.normalize(model.text_projection(torch.stack(states)), dim=-1)
    torch.testing.assert_close(packed, alone[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pool", ["first", "last", "mean"])
def test_exported_texts_of_several_lengths_are_pooled_as_each_alone(pool):
    torch.manual_seed(0)
    model = dual(text_pool=pool).eval()
    tokens, mask = torch.randint(1, 31, (2, 5)), torch.arange(5) < torch.tensor([[5], [3]])
    graph = next(graph for graph in graphs_of(model, image_size=24) if graph.name == "texts")
    with torch.no_grad():
        alone = [
            model.embed_texts(row, torch.ones_like(row), torch.tensor([0])) for row in (tokens[:1], tokens[1:, :3])
        ]
        torch.testing.assert_close(graph.function(tokens=tokens, mask=mask)[0], torch.cat(alone), rtol=1e-5, atol=1e-6)
