"""Self-critical training (Rennie et al. 2017): captions are drawn, and made likelier the better they score.

The baseline of a caption is the mean score of the others that were drawn for its image (Luo 2020).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.data.batch import TextRows, next_token_rows
from vlm.data.text.tokenizer import Tokenizer
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.decoding.search import search
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.frozen_features import Features
from vlm.nn.vocabulary_loss import Head

Drawn = list[list[list[int]]]  # tokens of K captions of each of B images, with the end token where one ended


@torch.no_grad()
def draw_captions(
    model: VisionLanguageModel,
    images: Tensor | Features,
    tokenizer: Tokenizer,
    *,
    ids: Sequence[str],
    count: int,
    max_tokens: int,
    seed: int,
) -> Drawn:
    """Captions that a model in evaluation draws; a draw depends on seed, id and number alone.

    Args:
        ids: Names of the images.
        count: Captions of an image.
    """
    options = Decoding(sampling=Sampling(), results=count, max_tokens=max_tokens, seed=seed, logprobs=False)
    device = next(model.parameters()).device
    with torch.autocast(device.type, enabled=False):  # which would cast the weights anew for every token
        context, bos_id, eos_id = model.encode(images), tokenizer.bos_id, tokenizer.eos_id
        drawn = search(model.decoder, context, options, bos_id=bos_id, eos_id=eos_id, ids=ids)
    return [[text.tokens for text in texts] for texts in drawn]


def rows_of(drawn: Drawn, tokenizer: Tokenizer) -> TextRows:
    """The captions of each image as a row, end to end, as captions of a data set are trained on."""
    begun = [[[tokenizer.bos_id, *tokens] for tokens in texts] for texts in drawn]
    return next_token_rows(begun, tokenizer.pad_id)


def advantages(rewards: Tensor) -> Tensor:
    """Rewards less the mean of the image's others: (B, K) -> (B, K), which sums to 0 in each row."""
    count = rewards.shape[1]
    return (count * rewards - rewards.sum(1, keepdim=True)) / (count - 1)


def reward_loss(hidden: Tensor, rows: TextRows, weights: Tensor, head: Head) -> tuple[Tensor, int]:
    """Cross-entropy of drawn tokens, each weighed by its caption's advantage, summed; and the number of tokens.

    Its gradient is that of the expected reward, with the sign of a loss (Williams 1992).

    Shapes:
        hidden (B, L, D), weights (B, K) -> sum ()
    """
    assert rows.segments is not None
    picked, labels = head.transformed(rows.targets.pick(hidden)), rows.targets.labels
    losses = F.cross_entropy(F.linear(picked, head.weight, head.bias).float(), labels, reduction="none")  # (T,)
    by_token = weights.gather(1, (rows.segments - 1).clamp(min=0))  # (B, L); padding has no target
    return (losses * rows.targets.pick(by_token[..., None])[:, 0]).sum(), rows.targets.count
