"""Losses, each as a sum with its count: the division by the count of the whole optimiser step comes later, once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.data.batch import PADDING
from vlm.nn.vocabulary_loss import token_losses, vocabulary_loss

IGNORE = -100  # the label of a position that has nothing to predict


def next_token_labels(tokens: Tensor, segments: Tensor | None) -> Tensor:
    """The token that each position has to predict: the next one of its own segment.

    This is the one place of the package where labels are shifted.

    Args:
        segments: None where each row is one segment.
    Shapes:
        tokens (B, L), segments (B, L) -> labels (B, L), IGNORE at the last token of a segment and in padding
    """
    labels = torch.full_like(tokens, IGNORE)
    if segments is None:
        labels[:, :-1] = tokens[:, 1:]
        return labels
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != PADDING)
    labels[:, :-1] = torch.where(follows, tokens[:, 1:], IGNORE)
    return labels


def token_loss(
    hidden: Tensor, labels: Tensor, weight: Tensor, *, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, summed over the labelled positions; only these go through the head.

    Args:
        weight: Of the head.
        label_smoothing: Share of the target spread evenly over the vocabulary (Szegedy et al. 2016, section 7).
    Shapes:
        hidden (B, L, D), labels (B, L), weight (V, D) -> sum (), count ()
    """
    labelled = labels != IGNORE
    count = labelled.sum()
    if count == labels.numel():  # windows of text: picking all would only copy, forward and backward
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
    else:
        hidden, labels = hidden[labelled], labels[labelled]
    return vocabulary_loss(hidden, labels, weight, label_smoothing=label_smoothing), count


def row_losses(hidden: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, summed over the labelled positions of each row; only these go through the head.

    Shapes:
        hidden (B, L, D), labels (B, L), weight (V, D) -> sums (B,), counts (B,)
    """
    labelled = labels != IGNORE
    losses = torch.zeros(labels.shape, device=hidden.device)
    losses[labelled] = token_losses(hidden[labelled], labels[labelled], weight)
    return losses.sum(1), labelled.sum(1)


def class_loss(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, summed over the images.

    Shapes:
        logits (B, C), targets: labels (B,) or the share of each class (B, C) -> sum (), count ()
    """
    loss = F.cross_entropy(logits.float(), targets, reduction="sum", label_smoothing=label_smoothing)
    return loss, torch.tensor(len(targets), device=logits.device)
