"""A ViT, a DeiT or SigLIP's encoder joined to a GPT-2, each described by its own part of config.json."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.architectures.deit import DEIT
from vlm.models.pretrained.architectures.gpt2 import GPT2
from vlm.models.pretrained.architectures.siglip_vision_model import SIGLIP_VISION
from vlm.models.pretrained.architectures.vit import VIT
from vlm.models.pretrained.specs import captioner
from vlm.models.pretrained.stack import Names, Part, Sources

STACKS = {"encoder": {"vit": VIT, "deit": DEIT, "siglip_vision_model": SIGLIP_VISION}, "decoder": {"gpt2": GPT2}}
PROJECTION = "enc_to_dec_proj"


def parts(config: Mapping[str, Any]) -> dict[str, Part]:
    """The parts.

    Raises:
        ValueError: One is of another kind.
    """
    placed = {}
    for place, stacks in STACKS.items():
        inner = config.get(place)
        held = inner.get("model_type") if isinstance(inner, Mapping) else None
        if held not in stacks:
            raise ValueError(f"its {place} is of type {held!r:.40} where {' or '.join(stacks)} can be read")
        placed[place] = Part(stacks[held], inner, f"{place}.")  # type: ignore[arg-type]
    return placed


def adjust(sources: Sources, names: Names) -> Sources:
    return fold_projection(sources, PROJECTION) if f"{PROJECTION}.weight" in names else sources


def fold_projection(sources: Sources, projection: str) -> Sources:
    """Puts a projection of the context's states into the keys and values made of them, which are linear in them too.

    Args:
        projection: Name of theirs, without its "weight" or "bias".
    """
    p, b = f"{projection}.weight", f"{projection}.bias"
    folded = dict(sources)
    for name, (names, _) in sources.items():
        if name.endswith("cross_attn.kv.weight"):
            folded[name] = ((*names, p), _projected_weight)
        elif name.endswith("cross_attn.kv.bias"):
            folded[name] = ((*names, names[0].removesuffix("bias") + "weight", b), _projected_bias)
    return folded


def _projected_weight(kv: Tensor, p: Tensor) -> Tensor:
    return (kv.double().T @ p.double()).float()


def _projected_bias(c: Tensor, kv: Tensor, b: Tensor) -> Tensor:
    return (kv.double().T @ b.double() + c.double()).float()


ARCHITECTURE = Architecture(
    parts=parts, models={"VisionEncoderDecoderModel": Model("captioning", captioner)}, adjust=adjust
)
