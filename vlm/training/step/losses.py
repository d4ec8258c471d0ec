"""Losses as a sum and a count; the sum is divided later, once, by the count of the entire optimiser step."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.data.batch import Targets
from vlm.nn.vocabulary_loss import Head, token_losses, vocabulary_loss


@dataclass
class Term:
    """A term of a loss: the mean of a sum over tokens, samples or pairs, times a weight.

    Args:
        total: The sum.
        count: Number of summed items; an int if it is known on the host.
        weight: Factor of the mean.
    """

    total: Tensor
    count: Tensor | int
    weight: float = 1.0


def token_loss(
    hidden: Tensor, targets: Targets, head: Head, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, int]:
    """Cross-entropy in nats, summed over the labelled positions; only these go through the head.

    Args:
        label_smoothing: Share of the target spread evenly over the vocabulary (Szegedy et al. 2016, section 7).
        z_loss: As in `vocabulary_loss`.
    Shapes:
        hidden (B, L, D) -> sum (), and the number of labelled positions
    """
    picked = head.apply_transform(targets.pick(hidden))
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    return vocabulary_loss(picked, targets.labels, head.weight, head.bias, **options), targets.count


def row_losses(hidden: Tensor, targets: Targets, head: Head) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, summed over the labelled positions of each row; only these go through the head.

    Shapes:
        hidden (B, L, D) -> sums (B,), counts (B,)
    """
    places = slice(None) if targets.places is None else targets.places
    losses = torch.zeros(hidden.shape[:2].numel(), device=hidden.device)
    counts = torch.zeros_like(losses, dtype=torch.long)
    losses[places] = token_losses(head.apply_transform(targets.pick(hidden)), targets.labels, head.weight, head.bias)
    counts[places] = 1
    return losses.view(hidden.shape[:2]).sum(1), counts.view(hidden.shape[:2]).sum(1)


def class_loss(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> tuple[Tensor, int]:
    """Cross-entropy in nats, summed over the images.

    Shapes:
        logits (B, C), targets: labels (B,) or the share of each class (B, C) -> sum (), and the number B
    """
    return F.cross_entropy(logits.float(), targets, reduction="sum", label_smoothing=label_smoothing), len(targets)
