"""CLIP's encoder of images (Radford et al. 2021): a ViT normalised before its first block too.

All states leave through the final norm, as GIT has it; CLIP's own output has it on the class token's alone.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlm.models.pretrained.architecture import Architecture
from vlm.models.pretrained.architectures import vit
from vlm.models.pretrained.stack import Names, Part, Sources, Stack, Table, layers, modules, same
from vlm.models.vit import ViT

LAYERS: Table = {
    "norm1": "layer_norm1",
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
DEFAULTS = {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
PATCHES = "embeddings.patch_embedding.weight"


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return vit.sizes({**DEFAULTS, **config}) | {"embed_norm": True}


def sources(encoder: ViT, names: Names) -> Sources:
    return {
        "class_token": (("embeddings.class_embedding",), torch.flatten),
        "positions.weight": (("embeddings.position_embedding.weight",), same),
        "patch_embed.weight": ((PATCHES,), same),
        "patch_embed.bias": ((PATCHES,), _no_bias),
        **modules({"embed_norm": "pre_layrnorm", "norm": "post_layernorm"}),
        **layers(encoder.blocks, LAYERS, "encoder.layers"),
    }


def _no_bias(weight: Tensor) -> Tensor:
    return weight.new_zeros(len(weight))


CLIP_VISION = Stack(kind=ViT, stem="vision_model.", sizes=sizes, sources=sources, needed={"num_channels": 3})
ARCHITECTURE = Architecture(parts=lambda config: {"encoder": Part(CLIP_VISION, config)})
