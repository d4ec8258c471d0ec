"""Any timm backbone as an image encoder."""

from difflib import SequenceMatcher
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vlm.errors import Count, UserError
from vlm.models.context import Context
from vlm.nn.image_size import ImageSize, plain, sides

RESIZES = {"center": "crop", "squash": "squash", "border": "pad"}  # our names for timm's crop modes


class TimmEncoder(nn.Module):
    """A backbone of the timm library (Wightman 2019), its features projected to the decoder's width.

    Args:
        name: Name of the backbone in timm, such as "vit_small_patch16_224" or "resnet18".
        dim: Width D of the projected states; None for no projection.
        image_size: Height and width of the images, in pixels; one number for squares.
        pretrained: Whether to download timm's pretrained weights.
        weights: Path of a local file of weights to use instead.
    Shapes:
        images (B, 3, H, W) -> Context with states (B, S, D): tokens of a transformer or cells of a feature map
    Raises:
        UserError: timm has no backbone of this name, or the weights cannot be loaded.
    """

    def __init__(
        self,
        *,
        name: str,
        dim: Count | None,
        image_size: ImageSize,
        pretrained: bool = False,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        self.backbone: Any = _create(name, image_size, pretrained, weights)
        self.dim: int = dim or self.backbone.num_features
        self.proj = nn.Linear(self.backbone.num_features, dim) if dim else nn.Identity()
        if torch.is_grad_enabled():
            _freeze_unused(self.backbone, image_size)

    def forward(self, images: Tensor) -> Context:
        return self.project(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """Features of the backbone: images (B, 3, H, W) -> (B, S, C)."""
        # EfficientNet-lite0 on a CPU: 15.8 ms per image channels-last, 23.3 ms otherwise (bfloat16, one core with AMX).
        features = self.backbone.forward_features(images.contiguous(memory_format=torch.channels_last))
        if features.ndim == 4:
            if features.shape[1] != self.backbone.num_features:  # channels-last backbone
                features = features.permute(0, 3, 1, 2)
            features = features.flatten(2).transpose(1, 2)  # (B, C, h, w) -> (B, S, C)
        return features

    def project(self, features: Tensor) -> Context:
        return Context(self.proj(features))

    def pool_images(self, images: Tensor) -> Tensor:
        """Features pooled by timm: images (B, 3, H, W) -> (B, C)."""
        return self.backbone(images)

    def layer_depths(self) -> dict[str, int]:
        """Number of layers above each parameter, in the backbone by timm's grouping: 1 for the last block.

        Tokens and positions that timm's grouping misses are grouped with the stem.
        """
        from timm.models import group_parameters

        head = "\0"  # matches no layer, like a classifier's name
        names = [*(name for name, _ in self.backbone.named_parameters()), head]
        named: Any = SimpleNamespace(named_parameters=lambda: ((name, None) for name in names))
        layers = group_parameters(named, self.backbone.group_matcher(coarse=False), reverse=True)
        top = layers[head]
        ungrouped = {name for name in names if layers[name] == top and "." not in name}
        depths = {f"backbone.{name}": top - (0 if name in ungrouped else layers[name]) for name in names[:-1]}
        return depths | {f"proj.{name}": 0 for name, _ in self.proj.named_parameters()}

    @staticmethod
    def prepares(*, name: str, pretrained: bool = False, weights: str | None = None, **others: Any) -> dict[str, Any]:
        """Preprocessing that the pretrained weights of a backbone were trained with, as far as timm records it.

        Returns:
            Arguments of `vlm.data.images.image.Preprocess`; empty without pretrained weights.
        """
        if not pretrained and weights is None:
            return {}
        from timm.models import get_pretrained_cfg

        pretrained_config = get_pretrained_cfg(name) if name in _names() else None
        if pretrained_config is None:
            return {}
        options = {
            "mean": list(pretrained_config.mean),
            "std": list(pretrained_config.std),
            "resize": RESIZES.get(pretrained_config.crop_mode),
        }
        return options | {"interpolation": pretrained_config.interpolation, "crop": pretrained_config.crop_pct}


def _freeze_unused(backbone: nn.Module, image_size: ImageSize) -> None:
    """Freezes parameters that features do not depend on, such as pooling layers. DDP needs a gradient for the rest."""
    training = backbone.training
    backbone.eval()  # keeps the statistics of normalisation layers
    backbone.forward_features(torch.zeros(1, 3, *sides(image_size))).sum().backward()  # type: ignore[operator]
    for parameter in backbone.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    backbone.train(training)


def _names() -> list[str]:
    import timm

    return timm.list_models()


def _similar_names(name: str, names: list[str], limit: int = 5) -> list[str]:
    """Names similar to the start of a name, most similar and shortest first."""
    similarity = {candidate: SequenceMatcher(None, name, candidate[: len(name)]).ratio() for candidate in names}
    similar = [candidate for candidate in names if similarity[candidate] > 0.6]
    return sorted(similar, key=lambda candidate: (-similarity[candidate], len(candidate), candidate))[:limit]


def _create(name: str, image_size: ImageSize, pretrained: bool, weights: str | None) -> Any:
    import timm

    if ":" in name or "/" in name or name not in _names():
        similar = ", ".join(_similar_names(name, _names())) or "none"
        raise UserError(f"model.encoder.name: timm has no backbone {name!r}; similar names: {similar}")
    options: dict = {"num_classes": 0, "pretrained": pretrained and weights is None}
    if weights is not None:
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"file": weights}}
    try:
        try:
            return timm.create_model(name, img_size=plain(image_size), **options)
        except TypeError:  # convolutional backbones take any size and have no img_size
            return timm.create_model(name, **options)
    except Exception as fault:  # timm's constructors and readers raise many types of exceptions
        reason = next(iter(str(fault).splitlines()), type(fault).__name__)
        if not pretrained and weights is None:
            size = plain(image_size)
            raise UserError(f"model.encoder: timm cannot build {name!r} for {size} pixels ({reason})") from fault
        source = f"file {weights}" if weights else "pretrained weights"
        raise UserError(
            f"model.encoder: cannot load the {source} for {name!r} ({reason});\n"
            "set model.encoder.pretrained=false, or give a local file with model.encoder.weights=FILE"
        ) from fault
