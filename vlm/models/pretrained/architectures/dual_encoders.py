"""CLIP and SigLIP: dual encoders of images and texts, and their image encoders."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from vlm.models.classifier import Classifier
from vlm.models.decoder import Decoder
from vlm.models.dual_encoder import DualEncoder
from vlm.models.pretrained.architecture import (
    Architecture,
    Export,
    Model,
    Spec,
    make_spec,
    name_class_head,
    specify_classifier,
)
from vlm.models.pretrained.export import export_classifier, export_towers
from vlm.models.pretrained.fields import COMMON, Entry, Fields, choice, integer, number, square
from vlm.models.pretrained.stack import (
    ACTIVATIONS,
    IMAGE_SIZES,
    SIZES,
    Names,
    Part,
    Paths,
    Stack,
    Weight,
    expand_layers,
    select_towers,
    token_weight,
)
from vlm.models.text_encoder import TextEncoder
from vlm.models.vit import ViT

CLIP_LAYERS: Paths = {
    "norm1": "layer_norm1",
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
PATCHES, POSITIONS = "embeddings.patch_embedding.weight", "embeddings.position_embedding.weight"
CLIP_DEFAULTS = {
    "activation": choice("hidden_act", "quick_gelu", ACTIVATIONS),
    "norm_eps": number("layer_norm_eps", 1e-5),
}


IMAGES = {"image_size": square("image_size", 224), "patch_size": square("patch_size", 32)}
CLIP_VISION = Stack(
    kind=ViT,
    model_type="clip_vision_model",
    prefix="vision_model.",
    sizes=SIZES | IMAGE_SIZES | IMAGES | CLIP_DEFAULTS | {"embed_norm": True},
    names={
        "class_token": Weight(("embeddings.class_embedding",)),
        "positions.weight": POSITIONS,
        "patch_embed.weight": PATCHES,
        "embed_norm": "pre_layrnorm",
        "norm": "post_layernorm",
        **expand_layers(CLIP_LAYERS, "encoder.layers"),
    },
    # Of a model of vlm that has a bias; theirs has none.
    extra={"patch_embed.bias": Weight((PATCHES,), lambda weight: weight.new_zeros(len(weight)))},
    unused=("embeddings.position_ids",),
    needed={"num_channels": 3},
    neutral_keys=("projection_dim", "vocab_size"),
    patch_bias=False,
)
PROJECTION = "visual_projection.weight"
CLIP_VISION_MODEL_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(CLIP_VISION, config)}, unused=(PROJECTION,)
)


CLIP_TEXT = Stack(
    kind=Decoder,
    model_type="clip_text_model",
    prefix="text_model.",
    sizes=SIZES
    | CLIP_DEFAULTS
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
        **expand_layers(CLIP_LAYERS, "encoder.layers"),
    },
    unused=("embeddings.position_ids",),
    neutral_keys=("projection_dim",),  # the model has its own
)
CLIP_WIDTH = integer("projection_dim", 512)
CLIP_TOWERS = {"encoder": CLIP_VISION, "text_encoder": CLIP_TEXT}


def read_clip_parts(config: Fields) -> dict[str, Part]:
    """Reads the parts of both encoders.

    Raises:
        UserError: A legacy part (vision_config_dict, text_config_dict), which replaces values and defaults, differs.
    """
    for name, stack in (("vision_config", CLIP_VISION), ("text_config", CLIP_TEXT)):
        legacy = f"{name}_dict"
        if legacy not in config or name not in config:
            continue
        replaced, stated = config.part(legacy), config.part(name)
        for key, value in replaced.values.items():
            if key not in COMMON and stated.values.get(key) != value:
                raise replaced.error(key, f"and {name}.{key} is {stated.values.get(key)!r:.60}")
        for entry in filter(lambda entry: isinstance(entry, Entry), stack.sizes.values()):
            if entry.name not in replaced.values and stated.values.get(entry.name, entry.default) != entry.default:
                raise stated.error(entry.name, f"which {legacy} lacks")
    return select_towers(config, CLIP_TOWERS)


def name_clip_heads(model: DualEncoder) -> Names:
    """Names of projections and scale, if our model pools like theirs."""
    if (model.pool, model.text_pool, model.text_fill) != ("class", "last", None):
        return {}
    names = {"image_projection": "visual_projection", "text_projection": "text_projection"}
    scale = Weight(("logit_scale",), lambda value: value.reshape(1), lambda vector: vector.reshape(()))
    return {**names, "log_scale": scale}


def fold_patch_bias(encoder: nn.Module, positions: Tensor) -> dict[str, Tensor]:
    """Returns the patch embedding and positions of CLIP, which has no patch bias: it is added to the positions.

    Args:
        positions: Those of the encoder.
    """
    folded: dict[str, Tensor] = {PATCHES: encoder.get_parameter("patch_embed.weight")}
    if (bias := encoder.state_dict().get("patch_embed.bias")) is not None:
        folded[POSITIONS] = torch.cat([positions[:1], positions[1:] + bias])
    return {f"{CLIP_VISION.prefix}{name}": tensor for name, tensor in folded.items()}


def export_clip(model: nn.Module) -> Export | None:
    if not isinstance(model, DualEncoder) or not isinstance(model.text_encoder, Decoder) or not name_clip_heads(model):
        return None
    config, tensors = export_towers(model, CLIP_TOWERS, name_clip_heads(model))
    tensors |= fold_patch_bias(model.encoder, tensors[f"{CLIP_VISION.prefix}{POSITIONS}"])
    width = len(model.text_projection.weight)
    return {"model_type": "clip", "architectures": ["CLIPModel"], CLIP_WIDTH.name: width, **config}, tensors


CLIP_ARCHITECTURE = Architecture(
    parts=read_clip_parts,
    models=dict.fromkeys(
        ("CLIPModel", "clip"),
        Model(
            "contrastive",
            lambda config, parts: make_spec(
                "DualEncoder", **parts, embed_dim=config.read(CLIP_WIDTH), pool="class", text_pool="last"
            ),
        ),
    ),
    heads={DualEncoder: name_clip_heads},
    unused=(PROJECTION, "text_projection.weight", "logit_scale", "classifier.{kind}"),
    special_tokens={"pad": "<|endoftext|>", "bos": "<|startoftext|>", "eos": "<|endoftext|>"},
    text_end_id=integer("eos_token_id", 49407, low=0),
    export=export_clip,
)


SIGLIP_SIZES = {
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
    sizes=SIZES | IMAGE_SIZES | SIGLIP_SIZES,
    names={
        "positions.weight": "embeddings.position_embedding.weight",
        "patch_embed": "embeddings.patch_embedding",
        "norm": "post_layernorm",
        **expand_layers(CLIP_LAYERS, "encoder.layers"),
    },
    unused=("embeddings.position_ids", *(f"head.{name}" for name in SIGLIP_VISION_MODEL_POOL)),
    needed={"num_channels": 3},
    # Of the pooling, which is part of the model, and of PaliGemma's projector.
    neutral_keys=("num_image_tokens", "num_positions", "projection_dim", "projector_hidden_act", "vision_use_head"),
    exported={"vision_use_head": False},
)
SIGLIP_VISION_MODEL_ARCHITECTURE = Architecture(parts=lambda config: {"encoder": Part(SIGLIP_VISION, config)})


SIGLIP_TEXT = Stack(
    kind=TextEncoder,
    model_type="siglip_text_model",
    prefix="text_model.",
    sizes=SIZES
    | {name: SIGLIP_SIZES[name] for name in ("activation", "norm_eps")}
    | {
        "vocab_size": integer("vocab_size", 32000),
        "max_len": integer("max_position_embeddings", 64),
        "token_types": None,
    },
    names={
        "token_embed.weight": "embeddings.token_embedding.weight",
        "positions.weight": "embeddings.position_embedding.weight",
        "norm": "final_layer_norm",
        **expand_layers(CLIP_LAYERS, "encoder.layers"),
    },
    unused=("embeddings.position_ids", "head.{kind}"),
    neutral_keys=("projection_size",),  # rows of the head, which the dual encoder reads
)
SIGLIP_TOWERS = {"encoder": SIGLIP_VISION, "text_encoder": SIGLIP_TEXT}
PAD = integer("pad_token_id", 1, low=0)
SIGLIP_WIDTH = integer("projection_size")
SIGLIP_POOL = "vision_model.head"


def _slice_in_proj(first: int, last: int, name: str) -> Weight:
    """Thirds `first` to `last` (excluded) of the rows of the fused projection of queries, keys and values."""

    def read(joined: Tensor) -> Tensor:
        size = len(joined) // 3
        return joined[first * size : last * size]

    return Weight((f"{SIGLIP_POOL}.attention.{name}",), read)


def name_siglip_heads(model: DualEncoder) -> Names:
    """Names of pooling, projection and scale, if our model pools like theirs."""
    if (model.pool, model.text_pool) != ("attention_mlp", "last") or model.text_fill is None or model.bias is None:
        return {}
    names: Names = {
        "attention_pool.query": token_weight(f"{SIGLIP_POOL}.probe"),
        "attention_pool.attn.proj": f"{SIGLIP_POOL}.attention.out_proj",
        "attention_pool.norm": f"{SIGLIP_POOL}.layernorm",
        **{f"attention_pool.mlp.{layer}": f"{SIGLIP_POOL}.mlp.{layer}" for layer in ("fc1", "fc2")},
        **{f"attention_pool.attn.q.{kind}": _slice_in_proj(0, 1, f"in_proj_{kind}") for kind in ("weight", "bias")},
        **{f"attention_pool.attn.kv.{kind}": _slice_in_proj(1, 3, f"in_proj_{kind}") for kind in ("weight", "bias")},
        "text_projection": "text_model.head",
        "log_scale": Weight(("logit_scale",)),
        "bias": Weight(("logit_bias",)),
    }
    return names


def specify_siglip(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    images = parts["encoder"]["args"]
    texts = config.part("text_config")
    fill = texts.read(PAD)
    if texts.read(SIGLIP_WIDTH) not in (None, images["dim"]):
        raise texts.error(SIGLIP_WIDTH.name, f"not the width of the image encoder, {images['dim']}")
    more = {"pool": "attention_mlp", "text_pool": "last", "text_bias": True, "image_projection": False, "sigmoid": True}
    sizes = {"embed_dim": images["dim"], "pool_heads": images["num_heads"], "text_fill": fill}
    return make_spec("DualEncoder", **parts, **sizes, **more)


def export_siglip_dual_encoder(model: DualEncoder) -> Export | None:
    """Exports both encoders, if our model pools and projects like theirs."""
    pool, images = model.attention_pool, model.encoder
    if (
        not name_siglip_heads(model)
        or pool is None
        or type(images) is not ViT
        or not isinstance(model.text_encoder, TextEncoder)
    ):
        return None
    unlike = pool.attn.num_heads != images.blocks[0].attn.num_heads  # type: ignore[union-attr]
    if unlike or not isinstance(model.image_projection, nn.Identity) or model.text_projection.bias is None:
        return None
    config, tensors = export_towers(model, SIGLIP_TOWERS, name_siglip_heads(model))
    for kind in ("weight", "bias"):
        parts = (pool.get_parameter(f"attn.{name}.{kind}") for name in ("q", "kv"))
        tensors[f"{SIGLIP_POOL}.attention.in_proj_{kind}"] = torch.cat([*parts])
    config["vision_config"] |= {"vision_use_head": True}
    config["text_config"] |= {PAD.name: model.text_fill, "projection_size": len(model.text_projection.weight)}
    return {"model_type": "siglip", "architectures": ["SiglipModel"], **config}, tensors


def export_siglip(model: nn.Module) -> Export | None:
    if isinstance(model, DualEncoder):
        return export_siglip_dual_encoder(model)
    if not isinstance(model, Classifier) or type(model.encoder) is not ViT or model.encoder.class_token is not None:
        return None
    config, tensors = export_classifier(model, SIGLIP_VISION, pool="mean", head=name_class_head(model, pool="mean"))
    kind = {"model_type": "siglip", "architectures": ["SiglipForImageClassification"]}
    return kind | {"vision_config": config}, tensors


SIGLIP_ARCHITECTURE = Architecture(
    parts=lambda config: select_towers(config, SIGLIP_TOWERS),
    models={
        "SiglipForImageClassification": Model("classification", partial(specify_classifier, pool="mean")),
        "SiglipModel": Model("contrastive", specify_siglip),
    },
    heads={Classifier: partial(name_class_head, pool="mean"), DualEncoder: name_siglip_heads},
    unused=("logit_scale", "logit_bias", "classifier.{kind}"),
    special_tokens=dict.fromkeys(("pad", "bos", "eos"), "</s>"),
    canonical=True,
    export=export_siglip,
)

ARCHITECTURES = {
    "clip": CLIP_ARCHITECTURE,
    "clip_vision_model": CLIP_VISION_MODEL_ARCHITECTURE,
    "siglip": SIGLIP_ARCHITECTURE,
    "siglip_vision_model": SIGLIP_VISION_MODEL_ARCHITECTURE,
}
