"""Models that read images inside their prompts: LLaVA, Idefics3, SmolVLM and PaliGemma."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.pretrained.architecture import IMAGE, Architecture, ImageText, Model, Spec, spec_of
from vlm.models.pretrained.architectures.dual_encoders import CLIP_VISION, SIGLIP_VISION
from vlm.models.pretrained.architectures.language_models import GEMMA, LLAMA, QWEN2
from vlm.models.pretrained.architectures.language_models import part as qwen2_part
from vlm.models.pretrained.fields import Fields, choice, flag, integer, square
from vlm.models.pretrained.stack import ACTIVATIONS, Names, Part, Stack, Weight, patterns_of
from vlm.nn.image_size import sides

VISION, TEXT = "vision_tower.", "language_model."
# Names in folders of versions around 4.55, whose head is outside of the model, and the names used here.
RENAMED = (
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^model\.language_model\.", f"{TEXT}model."),
    (r"^lm_head\.", f"{TEXT}lm_head."),
)
IMAGE_IDS = ("image_token_id", "image_token_index")  # two names of a key
# The length of prompts, which the processor states too, and sizes that the parts state.
NEUTRAL_KEYS = ("image_seq_length", "image_seq_len", "vocab_size", "hidden_size", "projection_dim")
DROPPED = {"default": 1, "full": 0}  # "default" drops the first state, whether or not it is a class token
LAYER = integer("vision_feature_layer", -2, -1000, 1000)


def stack_of(config: Fields, *stacks: Stack) -> Stack:
    """Selects the stack that a part of config.json describes.

    Raises:
        UserError: It is none of the given stacks.
    """
    known = {stack.model_type: stack for stack in stacks}
    held = str(config.get("model_type"))
    if held not in known:
        raise config.fault("model_type", f"where {' or '.join(known)} can be read")
    return known[held]


def cut_stack(stack: Stack, blocks: int, depth: int) -> Stack:
    """A copy of a stack of this depth that ends after its first blocks, without its final norm."""
    names = {name: other for name, other in stack.names.items() if name != "norm"}
    rest = [*patterns_of({name: other for name, other in stack.names.items() if name not in names})]
    layers = [*patterns_of({name: other for name, other in names.items() if name.startswith("blocks.")})]
    rest += [name.replace("*", str(layer), 1) for layer in range(blocks, depth) for name in layers]
    sizes = {**stack.sizes, "final_norm": False}
    return replace(stack, sizes=sizes, names=names, unused=(*stack.unused, *rest))


def llava_vision(config: Fields) -> Part:
    """The encoder up to the layer whose states are read.

    Raises:
        UserError: There is no such layer.
    """
    inner = config.part("vision_config")
    stack = stack_of(inner, CLIP_VISION, SIGLIP_VISION)
    depth, layer = inner.read(stack.sizes["depth"]), config.read(LAYER)
    blocks = layer if layer >= 0 else depth + 1 + layer
    if not 1 <= blocks <= depth:
        raise inner.fault(stack.sizes["depth"].name, f"of which {LAYER.name} {layer} is none")
    return Part(cut_stack(stack, blocks, depth), inner | {stack.sizes["depth"].name: blocks}, VISION)


def llava_text(config: Fields) -> Part:
    """The decoder's part; its head is tied to the embedding if config.json or its part for the text says so."""
    inner = config.part("text_config")
    stack = stack_of(inner, LLAMA, QWEN2)
    tied = flag("tie_word_embeddings", False)
    inner |= {tied.name: config.read(tied) or inner.read(tied)}
    return (qwen2_part(stack, inner) if stack is QWEN2 else Part(stack, inner))._replace(prefix=TEXT)


def inside(
    projector: Callable[[Fields, dict[str, Any]], Spec], *, causal: bool = True, drop: Callable[[Fields], int]
) -> Callable[[Fields, Mapping[str, Spec]], Spec]:
    """Returns a function that specifies a model whose decoder reads the encoder's states inside its text.

    Args:
        projector: Returns the projector's specification, from config.json and both widths.
        causal: Whether attention in the prompt is causal.
        drop: Returns the number of leading states to drop.
    """

    def build(config: Fields, parts: Mapping[str, Spec]) -> Spec:
        decoder, backbone = parts["decoder"], parts["encoder"]
        ids = {name: config.get(name) for name in IMAGE_IDS if name in config}
        if len({*map(str, ids.values())}) > 1:
            raise config.fault(IMAGE_IDS[0], f"and {IMAGE_IDS[1]} is {ids[IMAGE_IDS[1]]!r:.60}")
        dim = decoder["args"]["dim"]
        prefix = spec_of("Prefix", dim=dim, context_dim=dim, counted=True, causal=causal)
        decoder["args"]["prefix"] = prefix
        made = projector(config, {"context_dim": backbone["args"]["dim"], "dim": dim})
        encoder = spec_of("ProjectedEncoder", backbone=backbone, projector=made, dim=dim, drop=drop(config))
        return spec_of("VisionLanguageModel", encoder=encoder, decoder=decoder)

    return build


def mlp(config: Fields, widths: dict[str, Any]) -> Spec:
    activation = config.read(choice("projector_hidden_act", "gelu", ACTIVATIONS))
    bias = config.read(flag("multimodal_projector_bias", True))
    return spec_of("MLPProjector", **widths, activation=activation, bias=bias)


def dropped(config: Fields) -> int:
    return config.read(choice("vision_feature_select_strategy", "default", DROPPED))


def head(names: Names) -> Mapping[type, Callable[[Any], Names]]:
    """Names of a projector's layers."""
    named = {f"encoder.projector.{ours}": theirs for ours, theirs in names.items()}
    return {VisionLanguageModel: lambda model: named}


LLAVA_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": llava_vision(config), "decoder": llava_text(config)},
    models={"LlavaForConditionalGeneration": Model("captioning", inside(mlp, drop=dropped))},
    heads=head({f"fc{n}": f"multi_modal_projector.linear_{n}" for n in (1, 2)}),
    renamed=RENAMED,
    image=ImageText("image_token_index"),
    neutral_keys=NEUTRAL_KEYS,
)


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


SMOLVLM_ARCHITECTURE = replace(IDEFICS3_ARCHITECTURE, models={"SmolVLMForConditionalGeneration": MODEL})


BOTH = "use_bidirectional_attention"
GEMMA_TEXT = replace(GEMMA, needed={"attention_bias": False, BOTH: True})


def paligemma_text(config: Fields) -> Part:
    """The decoder's part.

    Raises:
        UserError: It is not a Gemma, for example in PaliGemma 2.
    """
    inner = config.part("text_config")
    stated = inner if BOTH in inner else inner | {BOTH: True}
    tied = flag("tie_word_embeddings", True)
    stack_of(inner, GEMMA)
    return Part(GEMMA_TEXT, stated | {tied.name: config.read(tied)}, TEXT)


def linear(config: Fields, widths: dict[str, Any]) -> Spec:
    return spec_of("LinearProjector", **widths)


PALIGEMMA_ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": Part(SIGLIP_VISION, config.part("vision_config"), VISION),
        "decoder": paligemma_text(config),
    },
    models={
        "PaliGemmaForConditionalGeneration": Model("captioning", inside(linear, causal=False, drop=lambda config: 0))
    },
    heads=head({"fc": "multi_modal_projector.linear"}),
    renamed=RENAMED,
    neutral_keys=NEUTRAL_KEYS,
    image=ImageText(
        "image_token_index", starts=False, form=f"{IMAGE}<bos>{{}}\n", caption="caption en", question="answer en {}"
    ),
)

ARCHITECTURES = {
    "idefics3": IDEFICS3_ARCHITECTURE,
    "llava": LLAVA_ARCHITECTURE,
    "paligemma": PALIGEMMA_ARCHITECTURE,
    "smolvlm": SMOLVLM_ARCHITECTURE,
}
