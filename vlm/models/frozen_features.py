"""Features from the frozen part of an encoder, which never change and can be cached.

The frozen part is the entire encoder, or its backbone if the encoder projects the features of one. Such an encoder has
`backbone`, ``features(images)`` and ``project(features)``.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.context import Context


@dataclass
class Features:
    """Features of images from the frozen part of an encoder; a model takes them instead of images.

    Shapes:
        values (B, S, C); C is D, or the width of the backbone
    """

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def to(self, *args: Any, **kwargs: Any) -> "Features":
        return Features(self.values.to(*args, **kwargs))

    def pin_memory(self) -> "Features":
        return Features(self.values.pin_memory())


@runtime_checkable
class FeatureProjector(Protocol):
    """An encoder that projects the features of its attribute `backbone`."""

    def features(self, images: Tensor) -> Tensor:
        """Features of the backbone: (B, 3, H, W) -> (B, S, C)."""

    def project(self, values: Tensor) -> Context:
        """Projects features to context: (B, S, C) -> states (B, S, D)."""


def projects(encoder: Any) -> bool:
    """Returns True for an encoder, or a class of encoders, that projects features of a backbone."""
    return issubclass(encoder if isinstance(encoder, type) else type(encoder), FeatureProjector)


def frozen_part(encoder: Any) -> nn.Module:
    """The part of an encoder that computes its features."""
    return encoder.backbone if projects(encoder) else encoder


def features_of(encoder: Any, images: Tensor) -> Tensor:
    """Features of images from the frozen part.

    Shapes:
        images (B, 3, H, W) normalised -> (B, S, C)
    Raises:
        UserError: The encoder masks some states.
    """
    if projects(encoder):
        return encoder.features(images)
    context = encoder(images)
    if context.mask is not None:
        raise UserError("data.cache_features: this encoder masks some states, which is not supported; set it to false")
    return context.states


def encode(encoder: Any, images: Tensor | Features) -> Context:
    """Context of images, or of their cached features."""
    if not isinstance(images, Features):
        return encoder(images)
    values = images.values.to(next(encoder.parameters()).dtype)  # kept in bfloat16, drawn captions read in float32
    return encoder.project(values) if projects(encoder) else Context(values)
