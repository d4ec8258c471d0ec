"""SigLIP's encoder of images (Zhai et al. 2023): a ViT without a class token."""

from collections.abc import Mapping
from typing import Any

from vlm.models.pretrained.architecture import Architecture
from vlm.models.pretrained.architectures import vit
from vlm.models.pretrained.architectures.clip_vision_model import LAYERS
from vlm.models.pretrained.stack import Names, Part, Sources, Stack, layers, modules, same
from vlm.models.vit import ViT

DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return vit.sizes({**DEFAULTS, **config}) | {"class_token": False}


def sources(encoder: ViT, names: Names) -> Sources:
    return {
        "positions.weight": (("embeddings.position_embedding.weight",), same),
        **modules({"patch_embed": "embeddings.patch_embedding", "norm": "post_layernorm"}),
        **layers(encoder.blocks, LAYERS, "encoder.layers"),
    }


SIGLIP_VISION = Stack(kind=ViT, stem="vision_model.", sizes=sizes, sources=sources, needed={"num_channels": 3})
ARCHITECTURE = Architecture(parts=lambda config: {"encoder": Part(SIGLIP_VISION, config)})
