"""GIT (Wang et al. 2022): CLIP's image encoder, whose states are the prefix of a decoder with BERT's layout."""

from dataclasses import replace
from typing import Any

from vlm.models.decoder import Decoder
from vlm.models.pretrained.architecture import Architecture, Model, captioner, spec_of
from vlm.models.pretrained.architectures import bert
from vlm.models.pretrained.architectures.clip_vision_model import CLIP_VISION
from vlm.models.pretrained.fields import Fields, flag, integer, square
from vlm.models.pretrained.stack import Part, Stack, layers

GIT_PROJECTION = "visual_projection.visual_projection"
GIT_VISION = replace(CLIP_VISION, sizes={**CLIP_VISION.sizes, "patch_size": square("patch_size", 16)})


def vision_config(config: Fields) -> Fields:
    return config.part("vision_config") if "vision_config" in config else config.part("", {})


def prefix_and_head(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    dim, states = sizes["dim"], GIT_VISION.arguments(vision_config(config))
    same = {"dim": dim, "vocab_size": sizes["vocab_size"]}
    own = not config.read(flag("tie_word_embeddings", False))
    norm = {"norm": True, "norm_eps": states["norm_eps"]}
    return {
        "prefix": spec_of("Prefix", dim=dim, context_dim=states["dim"], project=True, **norm),
        "vocabulary_head": spec_of("VocabularyHead", tied=not own, bias=True, **same),
    }


GIT_TEXT = Stack(
    kind=Decoder,
    model_type="git",
    prefix="git.",
    sizes=bert.TEXT_SIZES
    | {
        "depth": integer("num_hidden_layers", 6, high=1000),
        "max_len": integer("max_position_embeddings", 1024),
    },
    more=prefix_and_head,
    names={
        **bert.ENTRANCE,
        **layers(bert.BERT_LAYERS, "encoder.layer"),
        "prefix.project": f"{GIT_PROJECTION}.0",
        "prefix.norm": f"{GIT_PROJECTION}.1",
    },
    head={
        "token_embed.weight": f"git.{bert.WORDS}|{bert.WORDS}|output.weight",
        "vocabulary_head.own": "output",
        "vocabulary_head.bias": "output.bias",
    },
    unused=("embeddings.position_ids",),
    neutral_keys=bert.NEUTRAL_KEYS,
    needed=bert.NEEDED | {"num_image_with_embedding": None},  # used for video
)
GIT_ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": Part(GIT_VISION, vision_config(config), "git.image_encoder."),
        "decoder": Part(GIT_TEXT, config),
    },
    models={"GitForCausalLM": Model("captioning", captioner)},
)
