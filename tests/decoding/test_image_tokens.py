"""Sampled image tokens: compared with passes over all tokens so far, with and without guidance."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vlm.decoding.image_tokens import ImageSampling, sample_image_tokens
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.models.context import Context
from vlm.models.image_decoder import ImageTokenDecoder
from vlm.nn.grid_position import WrittenGridPositions
from vlm.randomness import numpy_rng

CODES, CELLS, IDS = 9, 6, ("a", "b", "c")


@pytest.fixture(scope="module")
def decoder() -> ImageTokenDecoder:
    torch.manual_seed(1)
    positions = WrittenGridPositions(dim=16, head_dim=8, image_size=(8, 12), patch_size=4)
    made = ImageTokenDecoder(num_codes=CODES, positions=positions, dim=16, depth=2, num_heads=2, context_dim=16)
    with torch.no_grad():
        made.token_embed.weight.mul_(4)  # far from uniform
    return made.eval()


@pytest.fixture(scope="module")
def contexts() -> tuple[Context, Context]:
    """Three texts of other lengths, and an empty one."""
    states = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(2))
    mask = torch.arange(5) < torch.tensor([5, 3, 4])[:, None]
    return Context(states[:3], mask), Context(states[3:, :2])


@torch.inference_mode()
def sample_slowly(decoder: ImageTokenDecoder, contexts: tuple[Context, Context], options: ImageSampling) -> Tensor:
    """The same by a pass over all tokens so far for each new one, text by text."""
    context, empty = contexts
    rows = []
    for row, id in enumerate(IDS):
        draws, tokens = numpy_rng(options.seed, "image", id).random(CELLS), list[int]()
        for place in range(CELLS):
            read = torch.tensor([[decoder.begin_id, *tokens]])
            texts = context.rows(slice(row, row + 1)), empty
            given, without = (decoder.head(decoder(read, None, text))[:, -1].double() for text in texts)
            logits = without + options.guidance * (given - without)
            probs = options.sampling.probabilities(logits)[0].numpy()
            tokens.append(int(np.searchsorted(probs.cumsum(), draws[place] * probs.sum(), side="right")))
        rows.append(tokens)
    return torch.tensor(rows)


@pytest.mark.parametrize("guidance", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=3), Sampling(top_p=0.8)])
def test_tokens_equal_those_of_passes_without_a_cache(decoder, contexts, sampling, guidance) -> None:
    options = ImageSampling(sampling=sampling, guidance=guidance, seed=5)
    context, empty = contexts
    tokens = sample_image_tokens(decoder, context, options, empty=empty, ids=IDS)
    assert tokens.shape == (3, CELLS) and torch.equal(tokens, sample_slowly(decoder, contexts, options))


def test_temperature_zero_takes_the_most_probable_tokens(decoder, contexts) -> None:
    context, empty = contexts
    greedy = ImageSampling(sampling=Sampling(temperature=0), guidance=2)
    tokens = sample_image_tokens(decoder, context, greedy, empty=empty, ids=IDS)
    with torch.inference_mode():
        given = decoder.head(decoder(decoder.shift(tokens), None, context))
        without = decoder.head(decoder(decoder.shift(tokens), None, empty.rows(torch.zeros(3, dtype=torch.long))))
    assert torch.equal((2 * given - without).argmax(-1), tokens)


def test_a_picture_depends_on_its_id_and_seed_but_not_on_the_batch(decoder, contexts) -> None:
    context, empty = contexts

    def draw(rows: list[int], seed: int = 0) -> Tensor:
        ids = [IDS[row] for row in rows]
        options = ImageSampling(guidance=1.5, seed=seed)
        return sample_image_tokens(decoder, context.rows(torch.tensor(rows)), options, empty=empty, ids=ids)

    together = draw([0, 1, 2])
    for row in range(3):
        assert torch.equal(draw([row])[0], together[row])
    assert torch.equal(draw([2, 0]), together[[2, 0]])
    assert not torch.equal(draw([0, 1, 2], seed=1), together)
    none = sample_image_tokens(decoder, context.rows(slice(0, 0)), ImageSampling(), empty=empty, ids=[])
    assert none.shape == (0, CELLS)


@pytest.mark.parametrize("guidance", [-0.1, 101, float("nan")])
def test_guidance_out_of_range_is_refused(guidance: float) -> None:
    with pytest.raises(UserError, match=r"--guidance .* is invalid; it must be from 0 to 100"):
        ImageSampling(guidance=guidance)
