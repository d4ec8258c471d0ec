"""Models that read images inside their prompts: LLaVA, Idefics3, SmolVLM and PaliGemma."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.encoder_decoder import LinearProjector, MLPProjector, VisionLanguageModel
from vlm.models.pretrained.architecture import IMAGE, Architecture, Export, ImageText, Model, make_spec
from vlm.models.pretrained.architectures.dual_encoders import CLIP_VISION, POSITIONS, SIGLIP_VISION
from vlm.models.pretrained.architectures.language_models import (
    GEMMA,
    LLAMA,
    QWEN2,
    QWEN3,
    require_full_attention,
)
from vlm.models.pretrained.architectures.vision import VIT
from vlm.models.pretrained.export import export_stack
from vlm.models.pretrained.fields import Fields, choice, flag, integer, square
from vlm.models.pretrained.joined_export import (
    REFUSED,
    TIED_LAST,
    export_joined,
    export_llava_vision,
    export_text,
    get_joined_parts,
    name_projector_tensors,
)
from vlm.models.pretrained.stack import ACTIVATIONS, Names, Part, Spec, StackArguments, list_patterns, select_stack
from vlm.nn.blocks import ACTIVATIONS as ACTIVATION_LAYERS
from vlm.nn.image_size import sides
from vlm.nn.position import BucketedGridPositions

VISION, TEXT = "vision_tower.", "language_model."
# Names in folders of versions around 4.55, whose head is outside of the model, and the names used here.
RENAMED = (
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^model\.language_model\.", f"{TEXT}model."),
    (r"^lm_head\.", f"{TEXT}lm_head."),
)
MODULES = (
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
    (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)
IMAGE_IDS = ("image_token_id", "image_token_index")  # two names of a key
# The length of prompts, which the processor states too, and sizes that the parts state.
NEUTRAL_KEYS = ("image_seq_length", "image_seq_len", "vocab_size", "hidden_size", "projection_dim")
DROPPED = {"default": 1, "full": 0}  # "default" drops the first state, whether or not it is a class token
LAYER = integer("vision_feature_layer", -2, -1000, 1000)
TIED = flag("tie_word_embeddings", False)


def read_llava_vision(config: Fields) -> Part:
    """Reads the encoder's part, up to the layer whose states are read.

    Raises:
        UserError: There is no such layer.
    """
    inner = config.part("vision_config")
    stack = select_stack(inner, CLIP_VISION, SIGLIP_VISION, VIT)
    depth, layer = inner.read(stack.sizes["depth"]), config.read(LAYER)
    blocks = layer if layer >= 0 else depth + 1 + layer
    if not 1 <= blocks <= depth:
        raise inner.error(stack.sizes["depth"].name, f"but {LAYER.name} is {layer}")
    if blocks == depth and stack is not CLIP_VISION and inner.read(TIED_LAST):
        return Part(stack, inner, VISION)
    names = {ours: theirs for ours, theirs in stack.names.items() if ours != "norm"}
    layers = [*list_patterns({ours: theirs for ours, theirs in names.items() if ours.startswith("blocks.")})]
    unused = [name.replace("*", str(block), 1) for block in range(blocks, depth) for name in layers]
    unused += list_patterns({"norm": stack.names["norm"]})
    sizes = {**stack.sizes, "final_norm": False}
    truncated = replace(stack, sizes=sizes, names=names, unused=(*stack.unused, *unused))
    return Part(truncated, inner | {stack.sizes["depth"].name: blocks}, VISION)


LLAVA_DECODERS = (LLAMA, QWEN2, QWEN3, GEMMA)


def read_llava_text(config: Fields) -> Part:
    """Reads the decoder's part; its head is tied to the embedding if config.json or its text_config says so."""
    inner = config.part("text_config")
    stack = select_stack(inner, *LLAVA_DECODERS)
    inner |= {TIED.name: config.read(TIED) or inner.read(flag(TIED.name, stack is GEMMA))}
    part = require_full_attention(stack, inner) if stack in (QWEN2, QWEN3) else Part(stack, inner)
    return part._replace(prefix=TEXT)


def specify_vision_language(
    config: Fields,
    parts: Mapping[str, Spec],
    *,
    projector: Callable[[Fields, dict[str, int]], Spec],
    causal: bool = True,
    count_dropped: Callable[[Fields], int] = lambda config: 0,
) -> Spec:
    """Specifies a model whose decoder reads the encoder's states inside its text.

    Args:
        projector: Returns the projector's specification, from config.json and both widths.
        causal: Whether attention in the prompt is causal.
        count_dropped: Returns the number of leading states to drop.
    """
    decoder, backbone = parts["decoder"], parts["encoder"]
    ids = {name: config.get(name) for name in IMAGE_IDS if name in config}
    if len({*map(str, ids.values())}) > 1:
        raise config.error(IMAGE_IDS[0], f"and {IMAGE_IDS[1]} is {ids[IMAGE_IDS[1]]!r:.60}")
    dim = decoder["args"]["dim"]
    decoder["args"]["prefix"] = make_spec("Prefix", dim=dim, context_dim=dim, counted=True, causal=causal)
    projector_spec = projector(config, {"context_dim": backbone["args"]["dim"], "dim": dim})
    drop = count_dropped(config)
    encoder = make_spec("ProjectedEncoder", backbone=backbone, projector=projector_spec, dim=dim, drop=drop)
    return make_spec("VisionLanguageModel", encoder=encoder, decoder=decoder)


def name_projector(names: Names) -> Mapping[type, Callable[[Any], Names]]:
    """Returns heads with the names of a projector's layers."""
    named = {f"encoder.projector.{ours}": theirs for ours, theirs in names.items()}
    return {VisionLanguageModel: lambda model: named}


LLAVA_PROJECTOR = {f"fc{n}": f"multi_modal_projector.linear_{n}" for n in (1, 2)}


def export_llava(model: nn.Module) -> Export | None:
    if (parts := get_joined_parts(model, MLPProjector, causal=True)) is None:
        return None
    encoder, projector, decoder = parts
    strategies = {drop: name for name, drop in DROPPED.items()}
    if encoder.drop not in strategies:
        raise UserError(f"model.encoder.drop: {encoder.drop} states are dropped, not 0 or 1{REFUSED}")
    kind = ("llava", "LlavaForConditionalGeneration")
    named = name_projector_tensors(projector, LLAVA_PROJECTOR)
    vision = export_llava_vision(encoder.backbone)
    config, tensors = export_joined(kind, vision, export_text(decoder, *LLAVA_DECODERS), named, (VISION, TEXT))
    activation = next(name for name, layer in ACTIVATION_LAYERS.items() if layer is projector.activation)
    config |= {
        "projector_hidden_act": choice("projector_hidden_act", "gelu", ACTIVATIONS).write(activation),
        "multimodal_projector_bias": projector.fc1.bias is not None,
        "vision_feature_select_strategy": strategies[encoder.drop],
        LAYER.name: -1,
    }
    return config, tensors


LLAVA_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": read_llava_vision(config), "decoder": read_llava_text(config)},
    models={
        "LlavaForConditionalGeneration": Model(
            "captioning",
            partial(
                specify_vision_language,
                projector=lambda config, widths: make_spec(
                    "MLPProjector",
                    **widths,
                    activation=config.read(choice("projector_hidden_act", "gelu", ACTIVATIONS)),
                    bias=config.read(flag("multimodal_projector_bias", True)),
                ),
                count_dropped=lambda config: config.read(choice("vision_feature_select_strategy", "default", DROPPED)),
            ),
        )
    },
    heads=name_projector(LLAVA_PROJECTOR),
    renamed=RENAMED,
    modules=MODULES,
    image=ImageText("image_token_index"),
    neutral_keys=NEUTRAL_KEYS,
    export=export_llava,
)


SHUFFLE = integer("scale_factor", 2, high=64)
IMAGE_BORDER = "<fake_token_around_image>"


def specify_bucketed_positions(sizes: StackArguments, config: Fields) -> StackArguments:
    """Adds the positions of the patches to the arguments of an encoder."""
    side = sides(sizes["image_size"])[0] // sizes["patch_size"]
    return sizes | {"positions": make_spec("BucketedGridPositions", dim=sizes["dim"], side=side)}


def find_buckets(count: int, side: int) -> Tensor:
    """Returns the row of a table of positions that Idefics3's code assigns to each row of patches of an image.

    It computes the fractional coordinate of each row in float32 and bucketizes it; rounding moves some to the positions
    of their neighbours.

    Args:
        count: Rows of patches.
        side: Rows of the table.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    shares = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
    return torch.bucketize(shares.clamp(max=1.0 - 1e-6), bounds, right=True)


def spread_bucketed_positions(positions: Tensor, side: int, shuffle: int) -> Tensor:
    """Returns a table from which Idefics3's code selects exactly these positions.

    If rounding assigns one row of a table of the usual size to patches that have different positions, the table is
    larger by `shuffle` rows and columns: the patches then have a row each. Rows that no patch has are copies.

    Args:
        side: Rows of patches of an image, a multiple of `shuffle`.
    """
    for size in (side, side + shuffle):
        nearest = torch.arange(size) * side // size
        table = positions[(nearest[:, None] * side + nearest).flatten()].clone()
        buckets = find_buckets(side, size)
        table[(buckets[:, None] * size + buckets).flatten()] = positions
        if table[(buckets[:, None] * size + buckets).flatten()].equal(positions):
            break
    return table


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
    more=specify_bucketed_positions,
    exported={},
)


def read_idefics3_vision(config: Fields) -> Part:
    """Reads the encoder's part.

    Raises:
        UserError: Its images are not square, or pixel shuffle does not divide its grid.
    """
    inner = config.part("vision_config")
    sizes = IDEFICS3_VISION.read_arguments(inner)
    height, width = sides(sizes["image_size"])
    if height != width:
        raise inner.error("image_size", "not the size of square tiles")
    if height // sizes["patch_size"] % (factor := config.read(SHUFFLE)):
        cells = f"{height // sizes['patch_size']} patches a side"
        raise config.error(SHUFFLE.name, f"{factor} does not divide {cells}")
    return Part(IDEFICS3_VISION, inner, VISION)


IDEFICS3_PROJECTOR = {"fc": "model.connector.modality_projection.proj"}
IDEFICS3_MODEL = Model(
    "captioning",
    partial(
        specify_vision_language,
        projector=lambda config, widths: make_spec(
            "LinearProjector", **widths, shuffle=config.read(SHUFFLE), bias=False
        ),
    ),
)


def export_idefics3(model: nn.Module, kind: tuple[str, str]) -> Export | None:
    """Exports a model whose projector is pixel shuffle and a linear layer.

    Args:
        kind: Model type and name of the Hugging Face class.
    """
    if (parts := get_joined_parts(model, LinearProjector, causal=True)) is None:
        return None
    encoder, projector, decoder = parts
    faults = []
    if projector.fc.bias is not None:
        faults.append("model.projector.bias is true, not false")
    if encoder.drop:
        faults.append(f"model.encoder.drop is {encoder.drop}, not 0")
    rows, columns = encoder.backbone.grid
    if rows != columns:
        faults.append(f"data.image_size makes {rows} x {columns} patches, not a square of them")
    if faults:
        raise UserError(f"{'; '.join(faults)}{REFUSED}")
    is_own = isinstance(encoder.backbone.positions, BucketedGridPositions)
    stack = IDEFICS3_VISION if is_own else replace(IDEFICS3_VISION, more=lambda sizes, config: {})
    config, tensors = export_stack(stack, encoder.backbone, "model.encoder.backbone")
    table = tensors[POSITIONS] if is_own else spread_bucketed_positions(tensors[POSITIONS], rows, projector.shuffle)
    tensors[POSITIONS] = table
    config |= {
        "model_type": f"{kind[0]}_vision",
        "image_size": isqrt(len(table)) * encoder.backbone.patch_embed.kernel_size[0],
    }
    named = name_projector_tensors(projector, IDEFICS3_PROJECTOR)
    text_config, texts = export_text(decoder, LLAMA)
    texts = {  # the head is at the top level
        f"model.text_model.{name.removeprefix(LLAMA.prefix)}" if name.startswith(LLAMA.prefix) else name: tensor
        for name, tensor in texts.items()
    }
    joined, tensors = export_joined(kind, (config, tensors), (text_config, texts), named, ("model.vision_model.", ""))
    return joined | {SHUFFLE.name: projector.shuffle}, tensors


IDEFICS3_ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": read_idefics3_vision(config),
        "decoder": Part(  # the top-level config defines whether the head is tied to the embedding
            select_stack(inner := config.part("text_config"), LLAMA), inner | {TIED.name: config.read(TIED)}, TEXT
        ),
    },
    models={"Idefics3ForConditionalGeneration": IDEFICS3_MODEL},
    heads=name_projector(IDEFICS3_PROJECTOR),
    renamed=(
        (r"^model\.vision_model\.", VISION),
        (r"^model\.text_model\.", f"{TEXT}model."),
        (r"^lm_head\.", f"{TEXT}lm_head."),
    ),
    modules=(
        (r"^vision_tower\.", "model.vision_model."),
        (r"^language_model\.model\.", "model.text_model."),
        (r"^language_model\.lm_head\.", "lm_head."),
    ),
    neutral_keys=(*NEUTRAL_KEYS, "max_sequence_length", "video_sampling"),
    image=ImageText(
        "image_token_id",
        before=f"{IMAGE_BORDER}<global-img>",
        after=IMAGE_BORDER,
        tile=f"{IMAGE_BORDER}<row_{{}}_col_{{}}>",
    ),
    export=lambda model: export_idefics3(model, ("idefics3", "Idefics3ForConditionalGeneration")),
)


SMOLVLM_ARCHITECTURE = replace(
    IDEFICS3_ARCHITECTURE,
    models={"SmolVLMForConditionalGeneration": IDEFICS3_MODEL},
    export=lambda model: export_idefics3(model, ("smolvlm", "SmolVLMForConditionalGeneration")),
)


BIDIRECTIONAL = "use_bidirectional_attention"
GEMMA_TEXT = replace(GEMMA, needed={"attention_bias": False, BIDIRECTIONAL: True})


def read_paligemma_text(config: Fields) -> Part:
    """Reads the decoder's part.

    Raises:
        UserError: It is not a Gemma, for example in PaliGemma 2.
    """
    inner = config.part("text_config")
    stated = inner if BIDIRECTIONAL in inner else inner | {BIDIRECTIONAL: True}
    tied = flag("tie_word_embeddings", True)
    select_stack(inner, GEMMA)
    return Part(GEMMA_TEXT, stated | {tied.name: config.read(tied)}, TEXT)


PALIGEMMA_PROJECTOR = {"fc": "multi_modal_projector.linear"}


def export_paligemma(model: nn.Module) -> Export | None:
    if (parts := get_joined_parts(model, LinearProjector, causal=False)) is None:
        return None
    encoder, projector, decoder = parts
    if projector.shuffle != 1 or projector.fc.bias is None or encoder.drop:
        raise UserError(f"model.projector: is not one linear layer with a bias for all states{REFUSED}")
    vision, images = export_stack(SIGLIP_VISION, encoder.backbone, "model.encoder.backbone")
    named = name_projector_tensors(projector, PALIGEMMA_PROJECTOR)
    kind = ("paligemma", "PaliGemmaForConditionalGeneration")
    prefixes = (f"{VISION}{SIGLIP_VISION.prefix}", TEXT)
    config, tensors = export_joined(kind, (vision, images), export_text(decoder, GEMMA_TEXT), named, prefixes)
    return config | {"projection_dim": decoder.dim, "hidden_size": decoder.dim}, tensors


PALIGEMMA_ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": Part(SIGLIP_VISION, config.part("vision_config"), VISION),
        "decoder": read_paligemma_text(config),
    },
    models={
        "PaliGemmaForConditionalGeneration": Model(
            "captioning",
            partial(
                specify_vision_language,
                projector=lambda config, widths: make_spec("LinearProjector", **widths),
                causal=False,
            ),
        )
    },
    heads=name_projector(PALIGEMMA_PROJECTOR),
    renamed=RENAMED,
    modules=MODULES,
    neutral_keys=NEUTRAL_KEYS,
    image=ImageText(
        "image_token_index", starts=False, form=f"{IMAGE}<bos>{{}}\n", caption="caption en", question="answer en {}"
    ),
    export=export_paligemma,
)

ARCHITECTURES = {
    "idefics3": IDEFICS3_ARCHITECTURE,
    "llava": LLAVA_ARCHITECTURE,
    "paligemma": PALIGEMMA_ARCHITECTURE,
    "smolvlm": SMOLVLM_ARCHITECTURE,
}
