"""Features from the frozen part of an encoder: always the same for an image, so that they can be kept.

That part is the whole encoder, unless the encoder projects what a backbone makes: then it is the backbone, and the
encoder says so by `backbone`, ``features(images)`` and ``project(features)``.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.context import Context


@dataclass
class Features:
    """Features of images from a frozen part, which a model takes in the images' place.

    Shapes:
        values (B, S, C): C is D, or the backbone's width
    """

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def to(self, *args: Any, **kwargs: Any) -> "Features":
        return Features(self.values.to(*args, **kwargs))

    def pin_memory(self) -> "Features":
        return Features(self.values.pin_memory())


@runtime_checkable
class Projecting(Protocol):
    """An encoder that projects the features of a backbone, its attribute `backbone`."""

    def features(self, images: Tensor) -> Tensor:
        """Features of the backbone: (B, 3, H, W) -> (B, S, C)."""

    def project(self, values: Tensor) -> Context:
        """The context of features: (B, S, C) -> states (B, S, D)."""


def projects(encoder: Any) -> bool:
    """True for an encoder, or a class of them, that projects the features of its backbone."""
    return issubclass(encoder if isinstance(encoder, type) else type(encoder), Projecting)


def frozen_part(encoder: Any) -> nn.Module:
    """The part of an encoder whose weights decide its features."""
    return encoder.backbone if projects(encoder) else encoder


def features_of(encoder: Any, images: Tensor) -> Tensor:
    """Features of images from the frozen part.

    Shapes:
        images (B, 3, H, W) normalised -> (B, S, C)
    Raises:
        UserError: The encoder masks states.
    """
    if projects(encoder):
        return encoder.features(images)
    context = encoder(images)
    if context.mask is not None:
        raise UserError("data.cache_features: this encoder masks some of its states, which is not kept; set it false")
    return context.states


def encode(encoder: Any, images: Tensor | Features) -> Context:
    """Context of images, or of the features that were kept of them."""
    if not isinstance(images, Features):
        return encoder(images)
    return encoder.project(images.values) if projects(encoder) else Context(images.values)
