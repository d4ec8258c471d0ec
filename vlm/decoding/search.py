"""Decoding for a batch of encoded inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

from vlm.decoding.loop import decode
from vlm.decoding.options import Decoding, Hypothesis
from vlm.models.context import Context
from vlm.models.text_decoder import TextDecoder
from vlm.nn.step.replay import StepperPool


@dataclass
class Sequences:
    """Generated token ids and log-probabilities, one list per row, without the begin token and with the end token."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


def greedy(decoder: TextDecoder, context: Context, *, bos_id: int, eos_id: int, max_tokens: int) -> Sequences:
    """Greedy search until the end token or max_tokens.

    Args:
        max_tokens: Maximum number of tokens of a text, end token excluded; limited by the decoder's maximum.
    Shapes:
        context states (B, S, D) -> B sequences
    """
    texts = search(decoder, context, Decoding(max_tokens=max_tokens), bos_id=bos_id, eos_id=eos_id)
    return Sequences([row[0].tokens for row in texts], [row[0].logprobs for row in texts])


def search(
    decoder: TextDecoder,
    context: Context,
    decoding: Decoding,
    *,
    bos_id: int,
    eos_id: int,
    ids: Sequence[int | str] | None = None,
    trees: dict[int, list] | None = None,
    pool: StepperPool | None = None,
) -> list[list[Hypothesis]]:
    """Texts for each input of a batch, best first.

    Args:
        ids: Ids of the inputs, for sampling; default their indices.
        trees, pool: See `decode`.
    """
    count = len(context.states)
    chunks = [(range(count) if ids is None else ids, context)] if count else []
    texts = dict(
        decode(
            decoder,
            chunks,
            decoding,
            bos_id=bos_id,
            eos_id=eos_id,
            rows=max(1, count),
            device=context.states.device,
            trees=trees,
            pool=pool,
        )
    )
    return [texts[place] for place in range(count)]
