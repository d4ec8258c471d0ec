"""The decoder of image tokens and its model: what it reads and predicts, causality, and gradients."""

import pytest
import torch

from vlm.models.context import Context
from vlm.models.image_decoder import ImageTokenDecoder, TextToImage
from vlm.models.text_encoder import TextEncoder
from vlm.nn.grid_position import WrittenGridPositions

CODES, CELLS = 11, 6


def model() -> TextToImage:
    torch.manual_seed(0)
    positions = WrittenGridPositions(dim=16, head_dim=8, image_size=(8, 12), patch_size=4)
    decoder = ImageTokenDecoder(num_codes=CODES, positions=positions, dim=16, depth=2, num_heads=2, context_dim=16)
    encoder = TextEncoder(vocab_size=20, max_len=8, dim=16, depth=1, num_heads=2)
    return TextToImage(encoder=encoder, decoder=decoder).eval()


TEXTS = torch.tensor([[1, 5, 6, 2], [1, 7, 2, 0]])
SEGMENTS = (TEXTS > 0).long()
IMAGES = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def test_each_token_is_predicted_from_those_before_it_and_the_text() -> None:
    made = model()
    logits = made.head(made(TEXTS, IMAGES, SEGMENTS))
    assert logits.shape == (2, CELLS, CODES)  # the begin token is never predicted
    assert made.decoder.max_len == CELLS and made.decoder.begin_id == CODES
    for place in range(CELLS):
        changed = IMAGES.clone()
        changed[:, place] = (changed[:, place] + 1) % CODES
        differs = (made.head(made(TEXTS, changed, SEGMENTS)) - logits).abs().amax((0, 2)) > 1e-6
        assert differs.tolist() == [at > place for at in range(CELLS)]
    other = TEXTS.clone()
    other[0, 1] = 9
    differs = (made.head(made(other, IMAGES, SEGMENTS)) - logits).abs().amax((1, 2)) > 1e-6
    assert differs.tolist() == [True, False]


def test_packed_texts_are_read_as_single_ones() -> None:
    made = model()
    packed, segments = torch.tensor([[1, 5, 6, 2, 1, 7, 2]]), torch.tensor([[1, 1, 1, 1, 2, 2, 2]])
    layout = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1]])
    expected = made(TEXTS, IMAGES, SEGMENTS)
    assert torch.allclose(made(packed, IMAGES, segments, None, layout), expected, atol=1e-5)


def test_steps_equal_a_pass_over_all_tokens() -> None:
    made = model()
    context = made.encode(TEXTS, SEGMENTS)
    with torch.inference_mode():
        expected = made.read_tokens(IMAGES, context)
        state = made.decoder.start(Context(context.states, context.mask), rows=2, max_len=CELLS)
        steps = [made.decoder.step(token[:, None], state)[:, 0] for token in made.decoder.shift(IMAGES).T]
    assert torch.allclose(torch.stack(steps, 1), expected, atol=1e-5)


def test_every_parameter_has_a_gradient() -> None:
    made = model().train()
    made.head(made(TEXTS, IMAGES, SEGMENTS)).logsumexp(-1).sum().backward()
    unused = [name for name, parameter in made.named_parameters() if parameter.grad is None]
    assert not unused


def test_operations_count_the_text_and_the_image() -> None:
    made = model()
    flop = made.flop()
    assert flop.read_token == made.encoder.flop().token and flop.head == made.decoder.flop().head
    with pytest.raises(ValueError, match="max_len 7 is more than the decoder's 6 positions"):
        made.decoder.start(made.encode(TEXTS, SEGMENTS), rows=2, max_len=7)
