"""Sampling of images as sequences of tokens, with classifier-free guidance."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.models.context import Context, concat_batches
from vlm.models.image_decoder import ImageTokenDecoder
from vlm.nn.step.replay import StepperPool
from vlm.randomness import numpy_rng

MAX_GUIDANCE = 100.0


@dataclass(frozen=True, kw_only=True)
class ImageSampling:
    """How the tokens of images are drawn.

    Args:
        sampling: The distribution of a token; temperature 0 takes the most probable one.
        guidance: Weight w of the text: logits are u + w (c - u), where c are the logits with the text and u those with
            an empty text (Ho and Salimans 2022, with w = 1 + their weight). 1 is no guidance.
        seed: Seed of sampling; a draw depends on it and on the id of the image only.
    Raises:
        UserError: The guidance is out of range.
    """

    sampling: Sampling = field(default_factory=Sampling)
    guidance: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.guidance <= MAX_GUIDANCE:
            raise UserError(f"--guidance {self.guidance:g} is invalid; it must be from 0 to {MAX_GUIDANCE:g}")


@torch.inference_mode()
def sample_image_tokens(
    decoder: ImageTokenDecoder,
    context: Context,
    options: ImageSampling,
    *,
    empty: Context,
    ids: Sequence[str],
    pool: StepperPool | None = None,
) -> Tensor:
    """Draws the tokens of an image for each encoded text.

    With guidance, each step computes a row with the text and one without.

    Args:
        context: The texts, B rows.
        empty: An empty text, one row.
        ids: Ids of the images, of which the random draws are a function.
        pool: Recorded steps to reuse across calls; default none.
    Shapes:
        -> tokens (B, L)
    """
    count, device, length = len(context.states), context.states.device, decoder.max_len
    if not count:
        return torch.empty(0, length, dtype=torch.long, device=device)
    guided = options.guidance != 1
    if guided:
        context = concat_batches([context, empty.rows(torch.zeros(count, dtype=torch.long, device=device))])
    rows = len(context.states)
    uniform = np.array([numpy_rng(options.seed, "image", id).random(length) for id in ids])
    draws = torch.from_numpy(uniform).to(device)  # (B, L)
    # Autocast would cast the weights again for every token.
    with torch.autocast(device.type, enabled=False):
        pool = StepperPool() if pool is None else pool
        stepper = pool.begin(decoder, context, rows=rows, max_len=length, beams=1, device=device)
        tokens = torch.empty(count, length, dtype=torch.long, device=device)
        read = torch.full((rows, 1), decoder.begin_id, device=device)
        for place in range(length):
            logits = stepper.logits(read)  # (rows, K)
            if guided:
                with_text, without = logits[:count], logits[count:]
                logits = without + options.guidance * (with_text - without)
            tokens[:, place] = options.sampling.draw(logits, draws[:, place])
            read = tokens[:, place, None].repeat(2 if guided else 1, 1)
    return tokens
