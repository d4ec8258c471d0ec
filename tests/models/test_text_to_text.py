"""Text to text against nn.Transformer; contexts side by side: a text with its image, several images of a record."""

import pytest
import torch
from torch import nn

from vlm.models.context import Context, concat_batches, concat_states
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import TextAndImageToText, TextToText, VisionLanguageModel, encode_in_parts
from vlm.models.text_encoder import TextEncoder
from vlm.models.vit import SeveralImages, ViT
from vlm.nn.attention import record_attention

V, D, N, MAX_LEN = 31, 24, 3, 16
SIZES = {"dim": D, "depth": 2, "num_heads": N}
IMAGES = torch.randn(4, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TEXTS = torch.randint(3, V, (4, 9), generator=torch.Generator().manual_seed(0))
SEGMENTS = (torch.arange(9) < torch.tensor([9, 4, 7, 2])[:, None]).long()  # texts of 9, 4, 7 and 2 tokens
TOKENS = torch.randint(V, (4, 7), generator=torch.Generator().manual_seed(1))


def text_to_text(**options):
    sizes = {"vocab_size": V, "max_len": MAX_LEN, **SIZES, **options}
    return TextToText(encoder=TextEncoder(**sizes), decoder=Decoder(**sizes, context_dim=D))


def copy(ours, theirs):
    """Weights of one of nn.Transformer's layers into one of our blocks."""
    pairs = {ours.attn.qkv: (theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias)}
    layers = {ours.attn.proj: theirs.self_attn.out_proj, ours.norm1: theirs.norm1}
    layers |= {ours.mlp.fc1: theirs.linear1, ours.mlp.fc2: theirs.linear2, ours.norm2: theirs.norm2}
    if isinstance(theirs, nn.TransformerDecoderLayer):
        cross, own = theirs.multihead_attn, ours.cross_attn
        pairs |= {own.q: (cross.in_proj_weight[:D], cross.in_proj_bias[:D])}
        pairs |= {own.kv: (cross.in_proj_weight[D:], cross.in_proj_bias[D:])}
        layers |= {own.proj: cross.out_proj, ours.norm_cross: theirs.norm2, ours.norm2: theirs.norm3}
    for layer, (weight, bias) in (pairs | {one: (other.weight, other.bias) for one, other in layers.items()}).items():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("pre_norm", [True, False])
def test_equals_nn_transformer(scramble, pre_norm, activation):
    sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 4 * D, "norm_first": pre_norm}
    theirs = scramble(nn.Transformer(D, N, dropout=0.0, activation=activation, batch_first=True, **sizes))
    ours = text_to_text(pre_norm=pre_norm, activation=activation).eval()
    for side in ("encoder", "decoder"):
        stack, other = getattr(ours, side), getattr(theirs, side)
        for block, layer in zip(stack.blocks, other.layers, strict=True):
            copy(block, layer)
        if pre_norm:
            stack.norm.load_state_dict(other.norm.state_dict())
        else:
            other.norm = None  # as in the paper, which has none after the last layer
    texts, tokens = ours.encoder.embed(TEXTS, torch.arange(9), None), ours.decoder.embed(TOKENS, torch.arange(7))
    padding = {name: SEGMENTS == 0 for name in ("src_key_padding_mask", "memory_key_padding_mask")}
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    truth = theirs(texts, tokens, tgt_mask=causal, tgt_is_causal=True, **padding)
    torch.testing.assert_close(ours(TEXTS, TOKENS, None, SEGMENTS), truth, rtol=0, atol=1e-5)


def test_contexts_of_different_lengths_are_joined_under_a_mask():
    states = torch.randn(3, 4, 2)
    parts = [Context(states[:1]), Context(states[1:, :2], torch.tensor([[True, False], [True, True]]))]
    found = concat_batches(parts)
    assert found.states.shape == (3, 4, 2) and not found.states[1:, 2:].any()
    assert found.mask.int().tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert concat_batches([Context(states[:1]), Context(states[1:])]).mask is None


class Masking(nn.Module):
    """Masks all cells of an image that are black."""

    def forward(self, images):
        cells = images.flatten(2).transpose(1, 2)
        return Context(cells, cells.any(-1))


@torch.no_grad()
def test_parts_of_a_batch_and_images_of_a_record_keep_their_masks():
    images = torch.randn(19, 2, 3, 2, 2) * (torch.rand(19, 2, 1, 2, 2) > 0.4)
    decoder = Decoder(vocab_size=V, max_len=4, dim=D, depth=1, num_heads=N, context_dim=3)
    model = VisionLanguageModel(encoder=SeveralImages(encoder=Masking(), dim=3, count=2), decoder=decoder)
    whole, parts = model.encode(images), encode_in_parts(model, images)
    assert torch.equal(whole.states, parts.states) and torch.equal(whole.mask, parts.mask)
    assert torch.equal(whole.mask, images.flatten(3).any(2).flatten(1)) and not whole.mask.all()


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
    with pytest.raises(ValueError, match="a record has 4 images, but the model takes at most 3"):
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
    with record_attention(model.decoder.blocks[0].cross_attn) as [weights]:
        hidden = model(texts, tokens, None, segments, images=IMAGES[:, 0])
    drawn = ["".join("1" if weight > 0 else "0" for weight in row) for row in weights[0][0, 0].tolist()]
    assert drawn == ["111001111"] * 4
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(4, 3, 4))
    other = IMAGES[:, 0].clone()
    other[1] = IMAGES[1, 1]
    changed = (model(texts, tokens, None, segments, images=other) - hidden).abs().amax((1, 2))
    assert changed[1] > 0.01 and not changed[[0, 2, 3]].any()
