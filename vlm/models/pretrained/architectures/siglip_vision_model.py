"""SigLIP's image encoder (Zhai et al. 2023): a ViT without a class token."""

from vlm.models.pretrained.architecture import Architecture
from vlm.models.pretrained.architectures.clip_vision_model import LAYERS
from vlm.models.pretrained.fields import choice, number, square
from vlm.models.pretrained.stack import ACTIVATIONS, IMAGE_SIZES, SIZES, Part, Stack, layers
from vlm.models.vit import ViT

OWN_SIZES = {
    "activation": choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
    "norm_eps": number("layer_norm_eps", 1e-6),
    "class_token": False,
    "image_size": square("image_size", 224),
}
# Tensors of the attention pooling.
SIGLIP_VISION_MODEL_POOL = (
    *("probe", "attention.in_proj_{kind}", "attention.out_proj.{kind}"),
    *("layernorm.{kind}", "mlp.fc1.{kind}", "mlp.fc2.{kind}"),
)
SIGLIP_VISION = Stack(
    kind=ViT,
    model_type="siglip_vision_model",
    prefix="vision_model.",
    sizes=SIZES | IMAGE_SIZES | OWN_SIZES,
    names={
        "positions.weight": "embeddings.position_embedding.weight",
        "patch_embed": "embeddings.patch_embedding",
        "norm": "post_layernorm",
        **layers(LAYERS, "encoder.layers"),
    },
    unused=("embeddings.position_ids", *(f"head.{name}" for name in SIGLIP_VISION_MODEL_POOL)),
    needed={"num_channels": 3},
    # Of the pooling, which is part of the model, and of PaliGemma's projector.
    neutral_keys=("num_image_tokens", "num_positions", "projection_dim", "projector_hidden_act", "vision_use_head"),
    written={"vision_use_head": False},
)
SIGLIP_VISION_MODEL_ARCHITECTURE = Architecture(parts=lambda config: {"encoder": Part(SIGLIP_VISION, config)})
