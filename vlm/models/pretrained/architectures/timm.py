"""Any image encoder of timm (Wightman 2019), in a folder as on the hub; its head is dropped."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from vlm.models.pretrained.architecture import Architecture
from vlm.models.pretrained.fields import REQUIRED, Fields, numbers, text
from vlm.models.pretrained.stack import Part, Stack, Weight, WeightMap
from vlm.models.timm_encoder import TimmEncoder
from vlm.nn.image_size import plain

BACKBONE = "backbone."
BUILT = (
    "img_size",
    "in_chans",
    "num_classes",
    "global_pool",
)  # arguments of timm's constructor that are also given by the name and the images


@dataclass(frozen=True, kw_only=True)
class TimmStack(Stack):
    """A backbone that timm builds by name, with timm's own tensor names."""

    def arguments(self, config: Fields) -> dict[str, Any]:
        more = config.part("model_args", {})
        if others := more.values.keys() - {*BUILT}:
            raise more.fault(min(others), "which is not passed on to timm")
        name = config.read(text("architecture", REQUIRED)).partition(".")[0]  # the part after the dot names the weights
        stated = config.part("pretrained_cfg")
        channels, height, width = stated.read(numbers("input_size", [3, 224, 224], 3, 1, 4096))
        if channels != 3:
            raise stated.fault("input_size", "not of images in three channels")
        return {"name": name, "dim": None, "image_size": plain((height, width))}

    def weights(self, module: nn.Module, stored: Collection[str] = ()) -> WeightMap:
        return {
            name: Weight((name.removeprefix(BACKBONE),)) for name in module.state_dict() if name.startswith(BACKBONE)
        }

    def neutral(self, config: Fields) -> list[str]:
        """The layers of the head of classes, which config.json names or else timm's own config of the model."""
        stated = config.part("pretrained_cfg", {}).values.get("classifier")
        if stated is None:
            from timm.models import get_pretrained_cfg

            known = get_pretrained_cfg(config.read(text("architecture", REQUIRED)).partition(".")[0])
            stated = None if known is None else known.classifier
        heads = stated if isinstance(stated, list | tuple) else [stated]
        return [f"{name}.{{kind}}" for name in heads if isinstance(name, str)]


TIMM = TimmStack(kind=TimmEncoder, model_type="timm", sizes={}, names={})
TIMM_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(TIMM, config)},
    # The head is dropped; what the weights are from, and how images are prepared, is read with the preprocessing.
    neutral_keys=("global_pool", "label_descriptions", "label_names", "num_classes", "num_features", "pretrained_cfg"),
)
