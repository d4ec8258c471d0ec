"""Idefics3 (Laurençon et al. 2024) and the first SmolVLM: SigLIP's encoder, pixel shuffle, a Llama."""

from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from vlm.models.pretrained.architecture import Architecture, ImageText, Model, Spec, spec_of
from vlm.models.pretrained.architectures.llama import LLAMA
from vlm.models.pretrained.architectures.llava import NEUTRAL_KEYS, TEXT, VISION, head, inside, stack_of
from vlm.models.pretrained.architectures.siglip_vision_model import SIGLIP_VISION
from vlm.models.pretrained.fields import Fields, flag, integer, square
from vlm.models.pretrained.stack import Part, Weight
from vlm.nn.image_size import sides

SHUFFLE = integer("scale_factor", 2, high=64)
AROUND = "<fake_token_around_image>"


def bucketed(table: Tensor) -> Tensor:
    """The rows of a table of positions that Idefics3's own code selects for the cells of a whole image.

    It computes the quotient of each row or column and their number in float32, and looks it up among the bounds of the
    cells; rounding moves some cells to the positions of their neighbours.
    """
    side = isqrt(len(table))
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    shares = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    cells = torch.bucketize(shares.clamp(max=1.0 - 1e-6), bounds, right=True)
    return table[(cells[:, None] * side + cells).flatten()]


IDEFICS3_VISION = replace(
    SIGLIP_VISION,
    model_type="idefics3_vision",
    prefix="",
    sizes={
        **SIGLIP_VISION.sizes,
        "dim": integer("hidden_size", 1152),
        "num_heads": integer("num_attention_heads", 16),
        "patch_size": square("patch_size", 32),
    },
    neutral_keys=(*SIGLIP_VISION.neutral_keys, "max_image_size", "size"),  # of the processor, which states them too
    names={**SIGLIP_VISION.names, "positions.weight": Weight(("embeddings.position_embedding.weight",), bucketed)},
)


def idefics3_vision(config: Fields) -> Part:
    """The encoder's part.

    Raises:
        UserError: Its images are not square, or pixel shuffle does not divide its grid.
    """
    inner = config.part("vision_config")
    sizes = IDEFICS3_VISION.arguments(inner)
    height, width = sides(sizes["image_size"])
    if height != width:
        raise inner.fault("image_size", "not of the squares that images are cut into")
    if height // sizes["patch_size"] % (joined := config.read(SHUFFLE)):
        cells = f"{height // sizes['patch_size']} patches a side"
        raise config.fault(SHUFFLE.name, f"{joined} does not divide {cells}")
    return Part(IDEFICS3_VISION, inner, VISION)


def idefics3_text(config: Fields) -> Part:
    """The decoder's part; the top-level config defines whether the head is tied to the embedding."""
    inner = config.part("text_config")
    tied = flag("tie_word_embeddings", False)
    return Part(stack_of(inner, LLAMA), inner | {tied.name: config.read(tied)}, TEXT)


def shuffled(config: Fields, widths: dict[str, Any]) -> Spec:
    return spec_of("LinearProjector", **widths, shuffle=config.read(SHUFFLE), bias=False)


MODEL = Model("captioning", inside(shuffled, drop=lambda config: 0))
IDEFICS3_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": idefics3_vision(config), "decoder": idefics3_text(config)},
    models={"Idefics3ForConditionalGeneration": MODEL},
    heads=head({"fc": "model.connector.modality_projection.proj"}),
    renamed=(
        (r"^model\.vision_model\.", VISION),
        (r"^model\.text_model\.", f"{TEXT}model."),
        (r"^lm_head\.", f"{TEXT}lm_head."),
    ),
    neutral_keys=(*NEUTRAL_KEYS, "max_sequence_length", "video_sampling"),
    image=ImageText(
        "image_token_id", before=f"{AROUND}<global-img>", after=AROUND, tile=f"{AROUND}<row_{{}}_col_{{}}>"
    ),
)
