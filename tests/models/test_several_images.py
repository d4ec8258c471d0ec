"""Contexts side by side: several images of a record, and a text with its image."""

import pytest
import torch

from vlm.models.context import Context, concat_states
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import TextAndImageToText
from vlm.models.several_images import SeveralImages
from vlm.models.text_encoder import TextEncoder
from vlm.models.vit import ViT
from vlm.nn.attention import recorded

V, D, MAX_LEN = 31, 24, 12
IMAGES = torch.randn(4, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SIZES = {"dim": D, "depth": 2, "num_heads": 3}


@pytest.fixture
def several(scramble):
    return scramble(SeveralImages(encoder=ViT(image_size=16, patch_size=8, **SIZES), dim=D, count=3))


def test_states_lie_side_by_side_and_what_has_no_mask_is_seen():
    one, other = Context(torch.randn(2, 3, D)), Context(torch.randn(2, 2, D), torch.tensor([[True, False], [True] * 2]))
    both = concat_states([one, other])
    assert torch.equal(both.states[:, :3], one.states) and torch.equal(both.states[:, 3:], other.states)
    assert both.mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert concat_states([one, one]).mask is None


@torch.no_grad()
def test_each_image_is_encoded_by_itself_and_joined_in_order(several):
    """Four cells an image; the vector of a place tells the first image from the second."""
    states = several(IMAGES).states
    assert states.shape == (4, 8, D)
    for place in range(2):
        alone = several.encoder(IMAGES[:, place]).states + several.order[place]
        torch.testing.assert_close(states[:, 4 * place : 4 * place + 4], alone)
    swapped = several(IMAGES.flip(1)).states.unflatten(1, (2, 4)).flip(1).flatten(1, 2)
    assert (swapped - states).abs().amax((1, 2)).min() > 0.01  # more than the order of the states
    assert torch.equal(several(IMAGES[:, 0]).states, several(IMAGES[:, :1]).states)


def test_more_images_than_the_model_reads_are_refused(several):
    with pytest.raises(ValueError, match="a record has 4 images; the model reads 3"):
        several(torch.randn(1, 4, 3, 16, 16))


@torch.no_grad()
def test_a_text_and_its_image_are_one_context(scramble):
    """Cross-attention of 4 words to a text of 3 and an image of 4 cells, drawn as rows of digits; 2 of padding."""
    encoder = TextEncoder(vocab_size=V, max_len=MAX_LEN, **SIZES)
    decoder = Decoder(vocab_size=V, max_len=MAX_LEN, context_dim=D, **SIZES)
    image_encoder = ViT(image_size=16, patch_size=8, **SIZES)
    model = scramble(TextAndImageToText(encoder=encoder, image_encoder=image_encoder, decoder=decoder))
    texts, tokens = torch.randint(3, V, (4, 5)), torch.randint(3, V, (4, 4))
    segments = (torch.arange(5) < torch.tensor([3, 5, 5, 5])[:, None]).long()
    with recorded(model.decoder.blocks[0].cross_attn) as [weights]:
        hidden = model(texts, tokens, None, segments, images=IMAGES[:, 0])
    drawn = ["".join("1" if weight > 0 else "0" for weight in row) for row in weights[0][0, 0].tolist()]
    assert drawn == ["111001111"] * 4
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(4, 3, 4))
    other = IMAGES[:, 0].clone()
    other[1] = IMAGES[1, 1]
    changed = (model(texts, tokens, None, segments, images=other) - hidden).abs().amax((1, 2))
    assert changed[1] > 0.01 and not changed[[0, 2, 3]].any()
