"""Sizes of our stacks, as they were built."""

from typing import Any

from torch import nn

from vlm.models.decoder import Decoder
from vlm.models.text_encoder import TextEncoder
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT
from vlm.nn.blocks import GATES
from vlm.nn.image_size import plain as plain_size
from vlm.nn.position import GridPositions, LearnedPositions
from vlm.nn.stems import PatchEmbed

OF_BLOCKS = ("dim", "num_heads", "activation", "norm", "norm_eps", "pre_norm", "qk_norm", "attn_scale", "bias")


def plain(sizes: dict[str, Any]) -> dict[str, Any]:
    """Sizes with None for default values, and the hidden width as a ratio unless the MLP is gated."""
    dim, heads, hidden = sizes["dim"], sizes["num_heads"], sizes.pop("hidden", None)
    defaults = {"num_kv_heads": heads, "qkv_bias": sizes["bias"]} | ({} if dim % heads else {"head_dim": dim // heads})
    sizes |= {name: None for name, value in defaults.items() if sizes.get(name) == value}
    if sizes["activation"] in GATES:
        return sizes | {"hidden_dim": hidden}
    return {"mlp_ratio": 4.0 if hidden is None else hidden / dim} | sizes


def sizes_built(stack: ViT | Decoder | TextEncoder | TimmEncoder) -> dict[str, Any]:
    """The arguments that a stack was built with, as far as Hugging Face's configs determine them."""
    if isinstance(stack, TimmEncoder):  # its name determines all sizes
        return {}
    block: Any = stack.blocks[0]
    sizes = {name: getattr(block.config, name) for name in (*OF_BLOCKS, "qkv_bias")}
    sizes |= {"head_dim": block.attn.head_dim, "num_kv_heads": block.attn.num_kv_heads, "hidden": block.config.hidden}
    sizes = plain(sizes) | {"depth": len(stack.blocks), "positions": _positions(stack.positions)}
    sizes["embed_norm"] = not isinstance(stack.embed_norm, nn.Identity)
    if isinstance(stack, ViT):
        return sizes | _image_sizes(stack)
    sizes |= {"vocab_size": stack.token_embed.num_embeddings, "max_len": stack.max_len}
    sizes["embed_scale"] = stack.embed_scale
    if isinstance(stack, TextEncoder):
        return sizes | {"token_types": None if stack.type_embed is None else stack.type_embed.num_embeddings}
    return sizes


def _positions(positions: nn.Module) -> Any:
    """The kind of a position encoding, or its specification if it has options."""
    if type(positions) in (LearnedPositions, GridPositions):
        return "learned"
    name = type(positions).__name__
    return {"name": name, "args": positions.options} if hasattr(positions, "options") else name


def _image_sizes(vit: ViT) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "class_token": vit.class_token is not None,
        "distillation_token": vit.distillation_token is not None,
        "stem": type(vit.patch_embed).__name__,
        "final_norm": not isinstance(vit.norm, nn.Identity),
    }
    if isinstance(vit.patch_embed, PatchEmbed):
        sizes["patch_size"] = vit.patch_embed.kernel_size[0]
        if _positions(vit.positions) == "learned":  # with other positions, a ViT accepts any image size
            rows, columns = vit.grid
            sizes["image_size"] = plain_size((sizes["patch_size"] * rows, sizes["patch_size"] * columns))
    return sizes
