"""CLIP's image encoder (Radford et al. 2021): a ViT with a norm before its first block.

The final norm is applied to all states, as in GIT; CLIP itself applies it only to the class token.
"""

from torch import Tensor

from vlm.models.pretrained.architecture import Architecture
from vlm.models.pretrained.fields import choice, number, square
from vlm.models.pretrained.stack import ACTIVATIONS, IMAGE_SIZES, SIZES, Part, Paths, Stack, Weight, layers
from vlm.models.vit import ViT

LAYERS: Paths = {
    "norm1": "layer_norm1",
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
PATCHES, POSITIONS = "embeddings.patch_embedding.weight", "embeddings.position_embedding.weight"
OWN_DEFAULTS = {
    "activation": choice("hidden_act", "quick_gelu", ACTIVATIONS),
    "norm_eps": number("layer_norm_eps", 1e-5),
}


def _no_bias(weight: Tensor) -> Tensor:
    return weight.new_zeros(len(weight))


IMAGES = {"image_size": square("image_size", 224), "patch_size": square("patch_size", 32)}
CLIP_VISION = Stack(
    kind=ViT,
    model_type="clip_vision_model",
    prefix="vision_model.",
    sizes=SIZES | IMAGE_SIZES | IMAGES | OWN_DEFAULTS | {"embed_norm": True},
    names={
        "class_token": Weight(("embeddings.class_embedding",)),
        "positions.weight": POSITIONS,
        "patch_embed.weight": PATCHES,
        "patch_embed.bias": Weight((PATCHES,), _no_bias),
        "embed_norm": "pre_layrnorm",
        "norm": "post_layernorm",
        **layers(LAYERS, "encoder.layers"),
    },
    unused=("embeddings.position_ids",),
    needed={"num_channels": 3},
    neutral_keys=("projection_dim", "vocab_size"),
)
PROJECTION = "visual_projection.weight"
CLIP_VISION_MODEL_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(CLIP_VISION, config)}, unused=(PROJECTION,)
)
