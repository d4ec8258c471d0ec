"""Sizes of stacks of ours, as they were built."""

from typing import Any

from torch import nn

from vlm.models.decoder import Decoder
from vlm.models.text_encoder import TextEncoder
from vlm.models.vit import ViT
from vlm.nn.blocks import ACTIVATIONS, SwiGLU
from vlm.nn.position import GridPositions, LearnedPositions
from vlm.nn.stems import PatchEmbed


def sizes_built(stack: ViT | Decoder | TextEncoder) -> dict[str, Any]:
    """The arguments that a stack was built with, as far as those of Hugging Face have a say in them."""
    block: Any = stack.blocks[0]
    attn, mlp = block.attn, block.mlp
    gated, dim = isinstance(mlp, SwiGLU), attn.proj.out_features
    learned = type(stack.positions) in (LearnedPositions, GridPositions)
    sizes = {
        "dim": dim,
        "depth": len(stack.blocks),
        "num_heads": attn.num_heads,
        "num_kv_heads": None if attn.num_kv_heads == attn.num_heads else attn.num_kv_heads,
        "head_dim": None if attn.num_heads * attn.head_dim == dim else attn.head_dim,
        "mlp_ratio": mlp.fc2.in_features * (1.5 if gated else 1) / dim,
        "activation": "swiglu" if gated else next(name for name, f in ACTIVATIONS.items() if f is mlp.activation),
        "norm": "rms" if isinstance(block.norm1, nn.RMSNorm) else "layer",
        "norm_eps": block.norm1.eps,
        "pre_norm": block.pre_norm,
        "qk_norm": attn.cosine is not None,
        "bias": attn.qkv.bias is not None,
        "positions": "learned" if learned else type(stack.positions).__name__,
        "embed_norm": not isinstance(stack.embed_norm, nn.Identity),
    }
    if isinstance(stack, ViT):
        return sizes | _image_sizes(stack, learned)
    sizes |= {"vocab_size": stack.token_embed.num_embeddings, "max_len": stack.max_len}
    if isinstance(stack, TextEncoder):
        sizes["token_types"] = None if stack.type_embed is None else stack.type_embed.num_embeddings
    return sizes


def _image_sizes(vit: ViT, learned: bool) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "class_token": vit.class_token is not None,
        "distillation_token": vit.distillation_token is not None,
        "stem": type(vit.patch_embed).__name__,
    }
    if isinstance(vit.patch_embed, PatchEmbed):
        sizes["patch_size"] = vit.patch_embed.kernel_size[0]
        if learned:  # else a ViT takes images of any size
            sizes["image_size"] = sizes["patch_size"] * grid_side(vit)
    return sizes


def grid_side(vit: ViT) -> int:
    """Patches along a side of the images that a ViT with learned positions takes."""
    cells = len(vit.positions.weight) - vit.leading  # type: ignore[arg-type]
    return round(cells**0.5)
