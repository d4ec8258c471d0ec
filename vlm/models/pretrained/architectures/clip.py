"""CLIP (Radford et al. 2021): of a model of ours the encoder of images; `pretrained.clip` has both towers."""

from vlm.models.decoder import Decoder
from vlm.models.pretrained.architecture import Architecture
from vlm.models.pretrained.architectures.clip_vision_model import CLIP_VISION, LAYERS, OWN_DEFAULTS
from vlm.models.pretrained.fields import integer
from vlm.models.pretrained.stack import SIZES, Part, Stack, layers

CLIP_TEXT = Stack(
    kind=Decoder,
    model_type="clip_text_model",
    prefix="text_model.",
    sizes=SIZES
    | OWN_DEFAULTS
    | {
        "dim": integer("hidden_size", 512),
        "num_heads": integer("num_attention_heads", 8),
        "hidden": integer("intermediate_size", 2048),
        "vocab_size": integer("vocab_size", 49408),
        "max_len": integer("max_position_embeddings", 77),
    },
    names={
        "token_embed.weight": "embeddings.token_embedding.weight",
        "positions.weight": "embeddings.position_embedding.weight",
        "norm": "final_layer_norm",
        **layers(LAYERS, "encoder.layers"),
    },
)
ARCHITECTURE = Architecture(parts=lambda config: {"encoder": Part(CLIP_VISION, config.part("vision_config"))})
