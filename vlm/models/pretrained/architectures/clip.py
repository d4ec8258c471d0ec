"""CLIP (Radford et al. 2021): an image encoder, and a causal text encoder that is pooled by its end token."""

from collections.abc import Mapping

import torch
from torch import nn

from vlm.models.decoder import Decoder
from vlm.models.dual_encoder import DualEncoder
from vlm.models.pretrained.architecture import Architecture, Export, Model, Spec, spec_of
from vlm.models.pretrained.architectures.clip_vision_model import (
    CLIP_VISION,
    LAYERS,
    OWN_DEFAULTS,
    PATCHES,
    POSITIONS,
    PROJECTION,
)
from vlm.models.pretrained.export import export_towers
from vlm.models.pretrained.fields import Entry, Fields, integer
from vlm.models.pretrained.neutral import COMMON
from vlm.models.pretrained.stack import SIZES, Names, Part, Stack, layers, scalar, towers

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
    unused=("embeddings.position_ids",),
    neutral_keys=("projection_dim",),  # the model has its own
)
CLIP_WIDTH = integer("projection_dim", 512)
CLIP_TOWERS = {"encoder": CLIP_VISION, "text_encoder": CLIP_TEXT}


def parts(config: Fields) -> dict[str, Part]:
    """The parts of both encoders.

    Raises:
        UserError: An early form of a part, which replaces its values and defaults, differs from it.
    """
    for name, stack in (("vision_config", CLIP_VISION), ("text_config", CLIP_TEXT)):
        early = f"{name}_dict"
        if early not in config or name not in config:
            continue
        replaced, stated = config.part(early), config.part(name)
        for key, value in replaced.values.items():
            if key not in COMMON and stated.values.get(key) != value:
                raise replaced.fault(key, f"and {name}.{key} is {stated.values.get(key)!r:.60}")
        for entry in filter(lambda entry: isinstance(entry, Entry), stack.sizes.values()):
            if entry.name not in replaced.values and stated.values.get(entry.name, entry.default) != entry.default:
                raise stated.fault(entry.name, f"which {early} lacks")
    return towers(config, CLIP_TOWERS)


def clip_heads(model: DualEncoder) -> Names:
    """Names of projections and scale, if our model pools like theirs."""
    if (model.pool, model.text_pool, model.text_fill) != ("class", "last", None):
        return {}
    names = {"image_projection": "visual_projection", "text_projection": "text_projection"}
    return names | {"log_scale": scalar("logit_scale")}


def clip_dual_encoder(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    return spec_of("DualEncoder", **parts, embed_dim=config.read(CLIP_WIDTH), pool="class", text_pool="last")


def clip_export(model: nn.Module) -> Export | None:
    if not isinstance(model, DualEncoder) or not isinstance(model.text_encoder, Decoder) or not clip_heads(model):
        return None
    config, tensors = export_towers(model, CLIP_TOWERS, clip_heads(model))
    # Their model has no patch bias, so it is added to the positions of the patches.
    patches, positions = (f"{CLIP_VISION.prefix}{name}" for name in (PATCHES, POSITIONS))
    weight, bias = (model.encoder.get_parameter(f"patch_embed.{name}") for name in ("weight", "bias"))
    tensors |= {patches: weight, positions: torch.cat([tensors[positions][:1], tensors[positions][1:] + bias])}
    about = {"model_type": "clip", "architectures": ["CLIPModel"], CLIP_WIDTH.name: len(model.text_projection.weight)}
    return about | config, tensors


CLIP_ARCHITECTURE = Architecture(
    parts=parts,
    models={name: Model("contrastive", clip_dual_encoder) for name in ("CLIPModel", "clip")},
    heads={DualEncoder: clip_heads},
    unused=(PROJECTION, "text_projection.weight", "logit_scale", "classifier.{kind}"),
    ends={"pad": "<|endoftext|>", "bos": "<|startoftext|>", "eos": "<|endoftext|>"},
    text_end=integer("eos_token_id", 49407, low=0),
    export=clip_export,
)
