"""Any timm backbone as an image encoder."""

from difflib import SequenceMatcher
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vlm.errors import Count, UserError
from vlm.models.context import Context

RESIZES = {"center": "crop", "squash": "squash", "border": "pad"}  # timm's names of what evaluation shows


class TimmEncoder(nn.Module):
    """A backbone of the timm library (Wightman 2019), its features projected to the decoder's width.

    Args:
        name: timm's name of the backbone, such as "vit_small_patch16_224" or "resnet18".
        dim: Width D of the states handed on.
        image_size: Side of the square input, in pixels.
        pretrained: Whether to fetch timm's pretrained weights.
        weights: A local file of weights to start from instead.
    Shapes:
        images (B, 3, H, W) -> Context with states (B, S, D): the tokens of a transformer, the cells of a feature map
    Raises:
        UserError: The name is unknown to timm, or its weights cannot be had.
    """

    def __init__(
        self, *, name: str, dim: Count, image_size: Count, pretrained: bool = False, weights: str | None = None
    ) -> None:
        super().__init__()
        self.dim = dim
        self.backbone: Any = _create(name, image_size, pretrained, weights)
        self.proj = nn.Linear(self.backbone.num_features, dim)
        if torch.is_grad_enabled():
            _freeze_unused(self.backbone, image_size)

    def forward(self, images: Tensor) -> Context:
        return self.project(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """Features of the backbone: images (B, 3, H, W) -> (B, S, C)."""
        features = self.backbone.forward_features(images)
        if features.ndim == 4:
            if features.shape[1] != self.backbone.num_features:  # some backbones are channels-last
                features = features.permute(0, 3, 1, 2)
            features = features.flatten(2).transpose(1, 2)  # (B, C, h, w) -> (B, S, C)
        return features

    def project(self, features: Tensor) -> Context:
        return Context(self.proj(features))

    def layer_depths(self) -> dict[str, int]:
        """Layers above each parameter, in the backbone by timm's own grouping: 1 for the last block.

        Tokens and positions that timm's grouping forgets stand beside the stem.
        """
        from timm.models import group_parameters

        head = "\0"  # fits no layer, as a classifier's name does
        names = [*(name for name, _ in self.backbone.named_parameters()), head]
        named: Any = SimpleNamespace(named_parameters=lambda: ((name, None) for name in names))
        layers = group_parameters(named, self.backbone.group_matcher(coarse=False), reverse=True)
        top = layers[head]
        forgotten = {name for name in names if layers[name] == top and "." not in name}
        depths = {f"backbone.{name}": top - (0 if name in forgotten else layers[name]) for name in names[:-1]}
        return depths | {f"proj.{name}": 0 for name, _ in self.proj.named_parameters()}

    @staticmethod
    def prepares(*, name: str, pretrained: bool = False, weights: str | None = None, **others: Any) -> dict[str, Any]:
        """The preprocessing that the pretrained weights of a backbone were trained with, as far as timm knows it.

        Returns:
            Arguments of `vlm.data.images.image.Preprocess`; none without pretrained weights.
        """
        if not pretrained and weights is None:
            return {}
        from timm.models import get_pretrained_cfg

        known = get_pretrained_cfg(name) if name in _names() else None
        if known is None:
            return {}
        options = {"mean": list(known.mean), "std": list(known.std), "resize": RESIZES.get(known.crop_mode)}
        return options | {"interpolation": known.interpolation, "crop": known.crop_pct}


def _freeze_unused(backbone: nn.Module, image_size: int) -> None:
    """Freezes what only the backbone's own classifier uses, such as its pooling: without a gradient, DDP would fail."""
    training = backbone.training
    backbone.eval()  # statistics of normalisation stay as they are
    backbone.forward_features(torch.zeros(1, 3, image_size, image_size)).sum().backward()  # type: ignore[operator]
    for parameter in backbone.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    backbone.train(training)


def _names() -> list[str]:
    import timm

    return timm.list_models()


def _near(name: str, names: list[str], shown: int = 5) -> list[str]:
    """The names that begin most like a name, shorter ones first."""
    likeness = {known: SequenceMatcher(None, name, known[: len(name)]).ratio() for known in names}
    alike = [known for known in names if likeness[known] > 0.6]
    return sorted(alike, key=lambda known: (-likeness[known], len(known), known))[:shown]


def _create(name: str, image_size: int, pretrained: bool, weights: str | None) -> Any:
    import timm

    if ":" in name or "/" in name or name not in _names():
        near = ", ".join(_near(name, _names())) or "none"
        raise UserError(f"model.encoder.name: timm has no backbone {name!r}; near it: {near}")
    options: dict = {"num_classes": 0, "pretrained": pretrained and weights is None}
    if weights is not None:
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"file": weights}}
    try:
        try:
            return timm.create_model(name, img_size=image_size, **options)
        except TypeError:  # convolutional backbones take any size and no img_size
            return timm.create_model(name, **options)
    except Exception as fault:  # readers of weights, and constructors given a size, fail in many ways
        reason = next(iter(str(fault).splitlines()), type(fault).__name__)
        if not pretrained and weights is None:
            raise UserError(f"model.encoder: timm cannot build {name!r} for {image_size} pixels ({reason})") from fault
        source = f"file {weights}" if weights else "pretrained weights"
        raise UserError(
            f"model.encoder: the {source} for {name!r} could not be loaded ({reason});\n"
            "set model.encoder.pretrained=false, or name a local file with model.encoder.weights=FILE"
        ) from fault
