"""GIT (Wang et al. 2022): CLIP's encoder of images, whose states are the prefix of a decoder laid out as BERT's."""

from collections.abc import Mapping
from typing import Any

from vlm.models.decoder import Decoder
from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.architectures import bert
from vlm.models.pretrained.architectures.clip_vision_model import CLIP_VISION
from vlm.models.pretrained.specs import captioner, part_of
from vlm.models.pretrained.stack import Names, Part, Sources, Stack, modules, same

PROJECTION = "visual_projection.visual_projection"
DEFAULTS = {"num_hidden_layers": 6, "max_position_embeddings": 1024}
VISION_DEFAULTS = {"patch_size": 16}


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    args, vision = bert.text_sizes({**DEFAULTS, **config}), _vision(config)
    own = not config.get("tie_word_embeddings", False)
    dim, states = args["dim"], CLIP_VISION.sizes(vision)
    prefix = {"context_dim": states["dim"], "project": True, "norm": True, "norm_eps": states["norm_eps"]}
    head = part_of("VocabularyHead", dim=dim, vocab_size=args["vocab_size"], tied=not own, bias=True)
    return args | {"prefix": part_of("Prefix", dim=dim, **prefix), "vocabulary_head": head}


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**VISION_DEFAULTS, **(config.get("vision_config") or {})}


def sources(decoder: Decoder, names: Names) -> Sources:
    table = {"prefix.project": f"{PROJECTION}.0", "prefix.norm": f"{PROJECTION}.1"}
    return bert.text_sources(decoder, bert.LAYERS) | modules(table)


def head(decoder: Decoder, names: Names) -> Sources:
    if decoder.vocabulary_head is not None and decoder.vocabulary_head.own is None:
        return {"vocabulary_head.bias": (("output.bias",), same)}
    return modules({"vocabulary_head.own": "output"})


GIT_TEXT = Stack(
    kind=Decoder,
    stem="git.",
    sizes=sizes,
    sources=sources,
    head=head,
    needed=bert.ABSOLUTE | {"num_image_with_embedding": None},  # which is for films
)
ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": Part(CLIP_VISION, _vision(config), "git.image_encoder."),
        "decoder": Part(GIT_TEXT, config),
    },
    models={"GitForCausalLM": Model("captioning", captioner)},
)
