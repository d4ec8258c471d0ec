"""Image encoders with projectors (mmproj files of llama.cpp): LLaVA's and Idefics3's, both ways."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlm.errors import UserError
from vlm.models.encoder_decoder import LinearProjector, MLPProjector, VisionLanguageModel
from vlm.models.pretrained.gguf.header import NUMBER, Allowed, Header, check_values, round_float
from vlm.models.pretrained.gguf.write import Contents, HeaderValue
from vlm.models.vit import ViT
from vlm.nn.embeddings import PatchEmbed
from vlm.nn.position import BucketedGridPositions, GridPositions

ARCHITECTURE, MLP, IDEFICS3 = "clip", "mlp", "idefics3"
PREFIX, FEATURE_LAYER, LONGEST = "clip.vision.", "clip.vision.feature_layer", "clip.vision.preproc_image_size"
SCALE_FACTOR = "clip.vision.projector.scale_factor"
# Our own keys, which llama.cpp ignores: how images are resized, as JSON; whether the GELU is the exact one.
PREPROCESS, EXACT_GELU = "vlm.preprocess", "vlm.exact_gelu"
SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "image_size": "image_size",
    "patch_size": "patch_size",
}
# Names in a file and ours, outside the layers and in a layer.
OUTER = {
    "v.class_embd": "class_token",
    "v.patch_embd.weight": "patch_embed.weight",
    "v.patch_embd.bias": "patch_embed.bias",
    "v.position_embd.weight": "positions.weight",
    "v.pre_ln": "embed_norm",
    "v.post_ln": "norm",
}
LAYER = {
    "ln1": "norm1",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_out": "attn.proj",
    "ln2": "norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
PROJECTORS = {MLP: {"mm.0": "fc1", "mm.2": "fc2"}, IDEFICS3: {"mm.model.fc": "fc"}}
# Our activations by the key that llama.cpp reads; without either it is the quick GELU.
GELUS = ("gelu_tanh", "gelu")
# Our names -> those in a folder of Hugging Face.
FOLDER_OUTER = {
    "class_token": "embeddings.class_embedding",
    "patch_embed": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "embed_norm": "pre_layrnorm",
    "norm": "post_layernorm",
}
FOLDER_LAYER = {
    "norm1": "layer_norm1",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.proj": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
FOLDER_PROJECTORS = {
    "mm.0": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
    "mm.model.fc": "model.connector.modality_projection.proj",
}


def _refuse(reason: str) -> UserError:
    return UserError(f"model.encoder: cannot be stored in GGUF: {reason}; use --to safetensors or onnx")


def make_projector(model: VisionLanguageModel, preprocess: Mapping[str, Any]) -> Contents:
    """Converts an image encoder and its projector to the content of an mmproj file.

    Args:
        preprocess: The state of the preprocessing of images.
    Raises:
        UserError: llama.cpp computes something else; the message names the part.
    """
    encoder: Any = model.encoder
    vit, projector = getattr(encoder, "backbone", None), getattr(encoder, "projector", None)
    if not isinstance(vit, ViT):
        raise _refuse(f"llama.cpp has no {type(vit or encoder).__name__}, only ViTs such as CLIP's and SigLIP's")
    _check_encoder(vit)
    has_class, has_norm = vit.class_token is not None, not isinstance(vit.norm, torch.nn.Identity)
    block: Any = vit.blocks[0]
    activation: str = block.config.activation
    values = _make_values(vit, preprocess)
    if type(projector) is MLPProjector:
        kind, depth = MLP, len(vit.blocks)
        if projector.fc1.bias is None or projector.activation is not torch.nn.functional.gelu:
            raise _refuse("the projector of LLaVA has biases and the activation gelu")
        if has_norm or encoder.drop != int(has_class):
            raise _refuse("LLaVA reads a ViT without a final norm (final_norm=false), and drops its class token")
        values[FEATURE_LAYER] = [depth]
    elif type(projector) is LinearProjector and projector.shuffle > 1:
        kind = IDEFICS3
        if has_class or not has_norm or encoder.drop or projector.fc.bias is not None:
            raise _refuse("Idefics3 reads a ViT with a final norm and no class token, through a layer without biases")
        values |= {SCALE_FACTOR: projector.shuffle, LONGEST: preprocess.get("longest_edge") or preprocess["image_size"]}
    else:
        raise _refuse(f"llama.cpp has the projectors of LLaVA and Idefics3, not this {type(projector).__name__}")
    values |= {"clip.projector_type": kind, f"{PREFIX}projection_dim": encoder.dim}
    if activation in GELUS:
        values |= {"clip.use_gelu": True} | ({EXACT_GELU: True} if activation == "gelu" else {})
    elif activation == "silu":
        values["clip.use_silu"] = True
    elif activation != "quick_gelu":
        raise _refuse(f"llama.cpp has no {activation} in image encoders")
    return Contents(ARCHITECTURE, values, _make_tensors(vit, projector, kind))


def _check_encoder(vit: ViT) -> None:
    block: Any = vit.blocks[0]
    config = block.config
    if (
        type(vit.patch_embed) is not PatchEmbed
        or type(vit.positions) not in (GridPositions, BucketedGridPositions)
        or vit.grid[0] != vit.grid[1]
    ):
        raise _refuse("llama.cpp reads square images with plain patches and learned positions")
    if vit.distillation_token is not None or config.norm != "layer" or not config.pre_norm or config.qk_norm:
        raise _refuse("llama.cpp has pre-norm ViTs with layer norms, without a distillation token or norms of queries")
    if not config.bias or config.qkv_bias is False or block.attn.num_kv_heads != block.attn.num_heads:
        raise _refuse("llama.cpp has ViTs with biases and as many keys as queries")
    if (
        config.hidden == vit.dim
        or block.attn.head_dim * block.attn.num_heads != vit.dim
        or config.attn_scale is not None
    ):
        raise _refuse("its heads do not divide its width, its MLP is as narrow, or it scales attention otherwise")


def _make_values(vit: ViT, preprocess: Mapping[str, Any]) -> dict[str, HeaderValue]:
    block: Any = vit.blocks[0]
    side = vit.patch_embed.kernel_size[0]  # type: ignore[index]
    sizes = (vit.dim, len(vit.blocks), block.attn.num_heads, block.config.hidden, float(block.config.norm_eps))
    stated = dict(zip(SIZES, (*sizes, vit.grid[0] * side, side), strict=True))
    return {
        "clip.has_vision_encoder": True,
        **{f"{PREFIX}{name}": value for name, value in stated.items()},
        f"{PREFIX}image_mean": [float(value) for value in preprocess["mean"]],
        f"{PREFIX}image_std": [float(value) for value in preprocess["std"]],
    }


def _make_tensors(vit: ViT, projector: torch.nn.Module, kind: str) -> dict[str, Tensor]:
    state = vit.state_dict()
    if isinstance(vit.positions, BucketedGridPositions):  # llama.cpp reads the position of each patch, in order
        state["positions.weight"] = state["positions.weight"][vit.positions.cells]
    if vit.class_token is not None and "patch_embed.bias" in state:  # CLIP's patches have none: positions take it
        positions, bias = state["positions.weight"], state.pop("patch_embed.bias")
        state["positions.weight"] = torch.cat([positions[:1], positions[1:] + bias])
    for name in [name for name in state if ".attn.qkv." in name]:
        stacked = state.pop(name)
        for part, tensor in zip("qkv", stacked.chunk(3), strict=True):
            state[name.replace(".qkv.", f".{part}.")] = tensor
    tensors: dict[str, Tensor] = {}
    for theirs, ours in OUTER.items():
        tensors |= {f"{theirs}{name.removeprefix(ours)}": state[name] for name in state if _is_of(name, ours)}
    for layer in range(len(vit.blocks)):
        for theirs, ours in LAYER.items():
            for end in ("weight", "bias"):
                tensors[f"v.blk.{layer}.{theirs}.{end}"] = state[f"blocks.{layer}.{ours}.{end}"]
    weights = projector.state_dict()
    for theirs, ours in PROJECTORS[kind].items():
        tensors |= {f"{theirs}{name.removeprefix(ours)}": weights[name] for name in weights if _is_of(name, ours)}
    return tensors


def _is_of(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def check_projector(header: Header) -> str:
    """Checks the keys of an mmproj file, and returns its kind of projector.

    Raises:
        KeyError: A value is missing.
        ValueError: It is not supported.
    """
    values = header.values
    if values["general.architecture"] != ARCHITECTURE:
        raise ValueError(f"general.architecture is {values['general.architecture']!r:.40}, not {ARCHITECTURE}")
    kind = values.get("clip.projector_type", values.get("clip.vision.projector_type"))
    if kind not in PROJECTORS:
        raise ValueError(f"clip.projector_type is {kind!r:.40}, not one of {', '.join(PROJECTORS)}")
    sizes = {f"{PREFIX}{name}": NUMBER for name in (*SIZES, "projection_dim")}
    allowed: dict[str, Allowed] = {
        **sizes,
        **{f"clip.has_{name}": [True] for name in ("vision_encoder", "llava_projector")},
        **{f"clip.has_{name}": [False] for name in ("text_encoder", "audio_encoder")},
        **dict.fromkeys(("clip.use_gelu", "clip.use_silu"), bool),
        **{key: [kind] for key in ("clip.projector_type", "clip.vision.projector_type")},
        EXACT_GELU: bool,
        **dict.fromkeys((f"{PREFIX}image_mean", f"{PREFIX}image_std"), list),
        "general.type": ["mmproj"],
        PREPROCESS: str,
        **({FEATURE_LAYER: list} if kind == MLP else {SCALE_FACTOR: int, LONGEST: int}),
    }
    check_values(values, header.tensors, allowed)
    return str(kind)


def make_vision_config(header: Header, kind: str) -> dict[str, Any]:
    """Converts the header of a checked mmproj file to parts of config.json: the encoder, and the projector.

    Raises:
        KeyError: A value is missing.
        ValueError: A value is not supported.
    """
    values = header.values
    vision: dict[str, Any] = {theirs: values[f"{PREFIX}{name}"] for name, theirs in SIZES.items()}
    vision["layer_norm_eps"] = round_float(vision["layer_norm_eps"])
    gelu, silu = values.get("clip.use_gelu", False), values.get("clip.use_silu", False)
    if gelu and silu:
        raise ValueError("clip.use_gelu and clip.use_silu contradict one another")
    approximate = "gelu" if values.get(EXACT_GELU) else "gelu_pytorch_tanh"
    vision["hidden_act"] = approximate if gelu else "silu" if silu else "quick_gelu"
    if kind == IDEFICS3:
        return {"model_type": IDEFICS3, "vision_config": vision, "scale_factor": values.get(SCALE_FACTOR, 1)}
    depth = vision["num_hidden_layers"]
    layers = values.get(FEATURE_LAYER) or [depth - 1]  # llama.cpp's default
    if len(layers) != 1 or layers[0] not in range(1, depth + 1) or "v.post_ln.weight" in header.tensors:
        raise ValueError(f"{FEATURE_LAYER} is {layers!r:.40} with {depth} layers, not one of them without v.post_ln")
    is_clip = "v.class_embd" in header.tensors
    return {
        "model_type": "llava",
        "vision_config": vision | {"model_type": "clip_vision_model" if is_clip else "siglip_vision_model"},
        "vision_feature_layer": layers[0],
        "vision_feature_select_strategy": "default" if is_clip else "full",
        "projector_hidden_act": "gelu",
    }


def make_preprocessor_config(header: Header, kind: str) -> dict[str, Any]:
    """Returns the content of preprocessor_config.json for an mmproj file that does not state our preprocessing."""
    values = header.values
    side = values[f"{PREFIX}image_size"]
    means = {"image_mean": values[f"{PREFIX}image_mean"], "image_std": values[f"{PREFIX}image_std"]}
    means = {name: [round_float(value) for value in channels] for name, channels in means.items()}
    if kind == IDEFICS3:
        longest = {"longest_edge": values.get(LONGEST, side)}
        tile = {"longest_edge": side}
        return {"image_processor_type": "Idefics3ImageProcessor", "size": longest, "max_image_size": tile, **means}
    sides = {"height": side, "width": side}
    if "v.class_embd" not in header.tensors:
        return {"image_processor_type": "SiglipImageProcessor", "size": sides, **means}
    return {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side}, "crop_size": sides, **means}


def map_projector_tensors(header: Header, kind: str) -> dict[str, str]:
    """Returns the name of each tensor in a folder with the content of `make_vision_config`.

    Raises:
        ValueError: A tensor does not belong to the model.
    """
    width = header.values[f"{PREFIX}embedding_length"]
    up = header.tensors.get("v.blk.0.ffn_up.weight")
    # Old files have both names swapped, which llama.cpp tells from the shape.
    swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if up is not None and up.shape[:1] == (width,) else {}
    names: dict[str, str] = {}
    for name in header.tensors:
        if name == "v.class_embd" or name in ("v.patch_embd.weight", "v.patch_embd.bias", "v.position_embd.weight"):
            ours = OUTER[name]
            module, _, end = ours.partition(".")
            names[name] = f"vision_tower.{FOLDER_OUTER[module]}" + (f".{end}" if end else "")
            continue
        module, _, end = name.rpartition(".")
        if module in OUTER:
            names[name] = f"vision_tower.{FOLDER_OUTER[OUTER[module]]}.{end}"
        elif module in PROJECTORS[kind]:
            names[name] = f"{FOLDER_PROJECTORS[module]}.{end}"
        elif name.startswith("v.blk.") and (parts := module.split("."))[-1] in LAYER and len(parts) == 4:
            inner = LAYER[swapped.get(parts[3], parts[3])]
            names[name] = f"vision_tower.encoder.layers.{parts[2]}.{FOLDER_LAYER[inner]}.{end}"
        else:
            raise ValueError(f"the tensor {name!r:.60} is not one of a projector of {kind}")
    return names
