"""Encoder of several images per record."""

import torch
from torch import Tensor, nn

from vlm.errors import Count
from vlm.models.context import Context, concat_states


class SeveralImages(nn.Module):
    """Encodes each image separately and concatenates their states in order, as Flamingo does (Alayrac et al. 2022).

    A learned vector per position in the order is added to the states of each image.

    Args:
        encoder: Images (B, 3, H, W) -> Context.
        dim: Width D of its states.
        count: Maximum number of images per record.
    Shapes:
        images (B, K, 3, H, W), or (B, 3, H, W) of one image each -> Context, states (B, K * S, D)
    """

    def __init__(self, *, encoder: nn.Module, dim: Count, count: Count) -> None:
        super().__init__()
        self.encoder, self.dim, self.count = encoder, dim, count
        self.order = nn.Parameter(torch.empty(count, dim))
        nn.init.normal_(self.order, std=0.5)

    def forward(self, images: Tensor) -> Context:
        several = images if images.ndim == 5 else images[:, None]
        rows, number = several.shape[:2]
        if number > self.count:
            raise ValueError(f"a record has {number} images; the model reads {self.count}, see model.encoder.count")
        context = self.encoder(several.flatten(0, 1))  # (B * K, S, D)
        states = context.states.unflatten(0, (rows, number)) + self.order[:number, None]
        masks = [None] * number if context.mask is None else context.mask.unflatten(0, (rows, number)).unbind(1)
        return concat_states([Context(*pair) for pair in zip(states.unbind(1), masks, strict=True)])
