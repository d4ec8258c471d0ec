"""The doubly stochastic term of Show, Attend and Tell: captions should attend to all parts of an image equally."""

from typing import Any

import torch
from torch import Tensor

from vlm.data.batch import Batch, TextRows
from vlm.errors import UserError
from vlm.models.soft_attention import SoftAttentionDecoder
from vlm.nn.position import positions_within
from vlm.training.feature_cache import as_read
from vlm.training.step.losses import Term, token_loss


class DoublyStochastic:
    """The loss of Xu et al. (2015, equation 14), averaged over tokens: cross-entropy plus the doubly stochastic term.

    Args:
        task: The captioning task.
        weight: Factor of the term, lambda.
    Raises:
        UserError: The task's decoder has no soft attention, or the task trains on a reward.
    """

    def __init__(self, task: Any, weight: float) -> None:
        if not isinstance(task.model.decoder, SoftAttentionDecoder):
            raise UserError(
                "task.doubly_stochastic: needs soft attention; choose model=show_attend_tell or set it to 0"
            )
        if task.critic is not None:
            raise UserError("task.doubly_stochastic: cannot be combined with task.reward; leave one of them out")
        self.task, self.weight = task, weight

    def loss(self, batch: Batch) -> dict[str, Term]:
        task, rows = self.task, batch["captions"]
        context = task.model.encode(as_read(batch["images"], task.preprocess))
        hidden, weights = task.model.decoder.attend(rows.tokens, rows.segments, context)
        smoothing = task.label_smoothing
        total, count = token_loss(hidden, rows.targets, task.model.head_parts, label_smoothing=smoothing)
        return {"tokens": Term(total + self.weight * doubly_stochastic_term(weights, rows), count)}


def doubly_stochastic_term(weights: Tensor, rows: TextRows) -> Tensor:
    """Returns the term, summed over captions: sum_i (1 - sum_t a_ti)^2 over image parts i and predicted tokens t.

    Shapes:
        weights (B, L, S) -> ()
    """
    assert rows.segments is not None
    begin = ((positions_within(rows.segments) == 0) & (rows.segments != 0)).flatten()
    number = begin.cumsum(0)  # number of each token's caption, from 1
    places = slice(None) if rows.targets.places is None else rows.targets.places
    looked = weights.new_zeros(len(number) + 1, weights.shape[2])  # there are fewer captions than tokens
    looked = looked.index_add(0, number[places], weights.flatten(0, 1)[places])  # (captions + 1 or more, S)
    one = torch.arange(len(looked), device=looked.device)
    real = (one > 0) & (one <= begin.sum())
    return ((1 - looked).square().sum(1) * real).sum()
