"""SigLIP (Zhai et al. 2023): both encoders, or the image encoder alone or with a classification head."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vlm.models.classifier import Classifier
from vlm.models.dual_encoder import DualEncoder
from vlm.models.pretrained.architecture import Architecture, Export, Model, Spec, classifier, spec_of
from vlm.models.pretrained.architectures.clip_vision_model import LAYERS
from vlm.models.pretrained.architectures.siglip_vision_model import OWN_SIZES, SIGLIP_VISION
from vlm.models.pretrained.export import export_classifier, export_towers
from vlm.models.pretrained.fields import Fields, integer
from vlm.models.pretrained.stack import SIZES, Names, Stack, Weight, layers, token, towers
from vlm.models.text_encoder import TextEncoder
from vlm.models.vit import ViT

SIGLIP_TEXT = Stack(
    kind=TextEncoder,
    model_type="siglip_text_model",
    prefix="text_model.",
    sizes=SIZES
    | {name: OWN_SIZES[name] for name in ("activation", "norm_eps")}
    | {
        "vocab_size": integer("vocab_size", 32000),
        "max_len": integer("max_position_embeddings", 64),
        "token_types": None,
    },
    names={
        "token_embed.weight": "embeddings.token_embedding.weight",
        "positions.weight": "embeddings.position_embedding.weight",
        "norm": "final_layer_norm",
        **layers(LAYERS, "encoder.layers"),
    },
    unused=("embeddings.position_ids", "head.{kind}"),
    neutral_keys=("projection_size",),  # rows of the head, which the dual encoder reads
)
SIGLIP_TOWERS = {"encoder": SIGLIP_VISION, "text_encoder": SIGLIP_TEXT}
PAD = integer("pad_token_id", 1, low=0)
SIGLIP_WIDTH = integer("projection_size")
SIGLIP_POOL = "vision_model.head"


def _third(first: int, last: int, name: str) -> Weight:
    """Thirds `first` to `last` (excluded) of the rows of the fused projection of queries, keys and values."""

    def read(joined: Tensor) -> Tensor:
        size = len(joined) // 3
        return joined[first * size : last * size]

    return Weight((f"{SIGLIP_POOL}.attention.{name}",), read)


def siglip_heads(model: DualEncoder) -> Names:
    """Names of pooling, projection and scale, if our model pools like theirs."""
    if (model.pool, model.text_pool) != ("attention_mlp", "last") or model.text_fill is None or model.bias is None:
        return {}
    names: Names = {
        "attention_pool.query": token(f"{SIGLIP_POOL}.probe"),
        "attention_pool.attn.proj": f"{SIGLIP_POOL}.attention.out_proj",
        "attention_pool.norm": f"{SIGLIP_POOL}.layernorm",
        **{f"attention_pool.mlp.{layer}": f"{SIGLIP_POOL}.mlp.{layer}" for layer in ("fc1", "fc2")},
        **{f"attention_pool.attn.q.{kind}": _third(0, 1, f"in_proj_{kind}") for kind in ("weight", "bias")},
        **{f"attention_pool.attn.kv.{kind}": _third(1, 3, f"in_proj_{kind}") for kind in ("weight", "bias")},
        "text_projection": "text_model.head",
        "log_scale": Weight(("logit_scale",)),
        "bias": Weight(("logit_bias",)),
    }
    return names


def siglip_dual_encoder(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    images = parts["encoder"]["args"]
    texts = config.part("text_config")
    fill = texts.read(PAD)
    if texts.read(SIGLIP_WIDTH) not in (None, images["dim"]):
        raise texts.fault(SIGLIP_WIDTH.name, f"not the width of the image encoder, {images['dim']}")
    more = {"pool": "attention_mlp", "text_pool": "last", "text_bias": True, "image_projection": False, "sigmoid": True}
    sizes = {"embed_dim": images["dim"], "pool_heads": images["num_heads"], "text_fill": fill}
    return spec_of("DualEncoder", **parts, **sizes, **more)


def class_head(model: Classifier) -> Names:
    """Name of the head, if our model reads the mean of all states like theirs."""
    return {"head": "classifier"} if model.pool == "mean" else {}


def export_dual(model: DualEncoder) -> Export | None:
    """Exports both encoders, if our model pools and projects like theirs."""
    pool, images = model.attention_pool, model.encoder
    if (
        not siglip_heads(model)
        or pool is None
        or type(images) is not ViT
        or not isinstance(model.text_encoder, TextEncoder)
    ):
        return None
    unlike = pool.attn.num_heads != images.blocks[0].attn.num_heads  # type: ignore[union-attr]
    if unlike or not isinstance(model.image_projection, nn.Identity) or model.text_projection.bias is None:
        return None
    config, tensors = export_towers(model, SIGLIP_TOWERS, siglip_heads(model))
    for kind in ("weight", "bias"):
        parts = (pool.get_parameter(f"attn.{name}.{kind}") for name in ("q", "kv"))
        tensors[f"{SIGLIP_POOL}.attention.in_proj_{kind}"] = torch.cat([*parts])
    config["vision_config"] |= {"vision_use_head": True}
    config["text_config"] |= {PAD.name: model.text_fill, "projection_size": len(model.text_projection.weight)}
    return {"model_type": "siglip", "architectures": ["SiglipModel"]} | config, tensors


def siglip_export(model: nn.Module) -> Export | None:
    if isinstance(model, DualEncoder):
        return export_dual(model)
    if not isinstance(model, Classifier) or type(model.encoder) is not ViT or model.encoder.class_token is not None:
        return None
    config, tensors = export_classifier(model, SIGLIP_VISION, pool="mean", head=class_head(model))
    whole = {"model_type": "siglip", "architectures": ["SiglipForImageClassification"], "vision_config": config}
    return whole, tensors


SIGLIP_ARCHITECTURE = Architecture(
    parts=lambda config: towers(config, SIGLIP_TOWERS),
    models={
        "SiglipForImageClassification": Model("classification", classifier("mean")),
        "SiglipModel": Model("contrastive", siglip_dual_encoder),
    },
    heads={Classifier: class_head, DualEncoder: siglip_heads},
    unused=("logit_scale", "logit_bias", "classifier.{kind}"),
    ends=dict.fromkeys(("pad", "bos", "eos"), "</s>"),
    canonical=True,
    export=siglip_export,
)
