"""GPT-2 and ViT as Hugging Face describes and stores them, told in our terms."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.vit import ViT
from vlm.nn.blocks import ACTIVATIONS, SwiGLU
from vlm.nn.position import GridPositions, LearnedPositions
from vlm.nn.stems import PatchEmbed

# Name of a tensor of ours -> names of theirs, and what makes ours of them.
Sources = dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]]

KINDS: dict[str, type[ViT] | type[Decoder]] = {"vit": ViT, "gpt2": Decoder}
STEMS = {"vit": "vit.", "gpt2": "transformer."}  # stands before the names of a model that has a head
NEEDED: dict[str, dict[str, Any]] = {  # what their layers must be for ours to compute the same
    "vit": {"qkv_bias": True, "num_channels": 3},
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
}
ACTIVATION_NAMES = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
PLAIN = {  # of both families, whatever their sizes
    "num_kv_heads": None,
    "head_dim": None,
    "norm": "layer",
    "pre_norm": True,
    "qk_norm": False,
    "bias": True,
    "positions": "learned",
}
VIT_LAYERS = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
GPT2_LAYERS = {
    "norm1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
GPT2_CROSS_LAYERS = {
    "norm_cross": "ln_cross_attn",
    "cross_attn.q": "crossattention.q_attn",
    "cross_attn.kv": "crossattention.c_attn",
    "cross_attn.proj": "crossattention.c_proj",
}


def sizes_built(stack: ViT | Decoder) -> dict[str, Any]:
    """The arguments that a stack was built with, as far as the two families have a say in them."""
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
    }
    if isinstance(stack, Decoder):
        return sizes | {"vocab_size": stack.token_embed.num_embeddings, "max_len": stack.max_len}
    return sizes | _image_sizes(stack, learned)


def _image_sizes(vit: ViT, learned: bool) -> dict[str, Any]:
    sizes: dict[str, Any] = {"class_token": vit.class_token is not None, "stem": type(vit.patch_embed).__name__}
    if isinstance(vit.patch_embed, PatchEmbed):
        sizes["patch_size"] = vit.patch_embed.kernel_size[0]
        if learned:  # else a ViT takes images of any size
            cells = len(vit.positions.weight) - sizes["class_token"]  # type: ignore[arg-type]
            sizes["image_size"] = sizes["patch_size"] * round(cells**0.5)
    return sizes


def sizes_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a config.json of a family asks for; it may leave out what is the family's default.

    Raises:
        TypeError, ZeroDivisionError: A value is not what it should be.
    """
    if config["model_type"] == "gpt2":
        dim = config.get("n_embd", 768)
        sizes = {
            "dim": dim,
            "depth": config.get("n_layer", 12),
            "num_heads": config.get("n_head", 12),
            "mlp_ratio": (config.get("n_inner") or 4 * dim) / dim,
            "activation": ACTIVATION_NAMES.get(config.get("activation_function", "gelu_new")),
            "norm_eps": config.get("layer_norm_epsilon", 1e-5),
            "vocab_size": config.get("vocab_size", 50257),
            "max_len": config.get("n_positions", 1024),
        }
    else:
        dim = config.get("hidden_size", 768)
        sizes = {
            "dim": dim,
            "depth": config.get("num_hidden_layers", 12),
            "num_heads": config.get("num_attention_heads", 12),
            "mlp_ratio": config.get("intermediate_size", 3072) / dim,
            "activation": ACTIVATION_NAMES.get(config.get("hidden_act", "gelu")),
            "norm_eps": config.get("layer_norm_eps", 1e-12),
            "image_size": config.get("image_size", 224),
            "patch_size": config.get("patch_size", 16),
            "class_token": True,
            "stem": "PatchEmbed",
        }
    known = {name: value for name, value in sizes.items() if value is not None}
    return PLAIN | known


def not_ours(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a config.json asks for that our layers do not do."""
    for name, needed in NEEDED[config["model_type"]].items():
        if config.get(name, needed) != needed:
            yield f"{name}={config[name]}"
    for name in ("activation_function", "hidden_act"):
        if name in config and config[name] not in ACTIVATION_NAMES:
            yield f"{name}={config[name]}"


def vit_sources(vit: ViT, ours: str, theirs: str) -> Sources:
    """Sources of the tensors of a ViT with a class token, each name with its prefix.

    Args:
        ours: Prefix of names of ours.
        theirs: Prefix of names of theirs.
    """
    embeddings = f"{theirs}embeddings"
    sources: Sources = {
        f"{ours}class_token": ((f"{embeddings}.cls_token",), torch.flatten),
        f"{ours}positions.weight": ((f"{embeddings}.position_embeddings",), lambda table: table[0]),
    }
    for kind in ("weight", "bias"):
        sources[f"{ours}patch_embed.{kind}"] = ((f"{embeddings}.patch_embeddings.projection.{kind}",), _same)
        sources[f"{ours}norm.{kind}"] = ((f"{theirs}layernorm.{kind}",), _same)
        for n in range(len(vit.blocks)):
            block, layer = f"{ours}blocks.{n}", f"{theirs}encoder.layer.{n}"
            joined = tuple(f"{layer}.attention.attention.{part}.{kind}" for part in ("query", "key", "value"))
            sources[f"{block}.attn.qkv.{kind}"] = (joined, lambda *parts: torch.cat(parts))
            for name, other in VIT_LAYERS.items():
                sources[f"{block}.{name}.{kind}"] = ((f"{layer}.{other}.{kind}",), _same)
    return sources


def gpt2_sources(decoder: Decoder, ours: str, theirs: str, stored: Collection[str]) -> Sources:
    """Sources of a Decoder's tensors, cross-attention included where GPT-2 has one; if not, that keeps its weights.

    Args:
        ours: Prefix of names of ours.
        theirs: Prefix of names of theirs.
        stored: Names of theirs that there are.
    """
    embedding = f"{theirs}wte.weight"
    head = f"{theirs.removesuffix(STEMS['gpt2'])}lm_head.weight"
    sources: Sources = {
        f"{ours}token_embed.weight": ((embedding, head), _tied) if head in stored else ((embedding,), _same),
        # A text that fits has its first positions, however many there are after them.
        f"{ours}positions.weight": ((f"{theirs}wpe.weight",), lambda table: table[: decoder.max_len]),
    }
    crossing = any(".crossattention." in name for name in stored if name.startswith(theirs))
    for kind in ("weight", "bias"):
        sources[f"{ours}norm.{kind}"] = ((f"{theirs}ln_f.{kind}",), _same)
        for n, block in enumerate(decoder.blocks):
            crossed = crossing and getattr(block, "cross_attn", None) is not None
            for name, other in (GPT2_LAYERS | (GPT2_CROSS_LAYERS if crossed else {})).items():
                # GPT-2's linear layers hold their weights transposed.
                make = torch.t if kind == "weight" and "norm" not in name else _same
                sources[f"{ours}blocks.{n}.{name}.{kind}"] = ((f"{theirs}h.{n}.{other}.{kind}",), make)
    return sources


def fold_projection(sources: Sources, projection: str) -> Sources:
    """Puts a projection of the context's states into the keys and values made of them, which are linear in them too.

    Args:
        projection: Name of theirs, without its "weight" or "bias".
    """
    p, b = f"{projection}.weight", f"{projection}.bias"
    folded = dict(sources)
    for name, (names, _) in sources.items():
        if name.endswith("cross_attn.kv.weight"):
            folded[name] = ((*names, p), lambda kv, p: (kv.double().T @ p.double()).float())
        elif name.endswith("cross_attn.kv.bias"):
            weight = names[0].removesuffix("bias") + "weight"
            folded[name] = ((*names, weight, b), lambda c, kv, b: (kv.double().T @ b.double() + c.double()).float())
    return folded


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _tied(embedding: Tensor, head: Tensor) -> Tensor:
    if not torch.equal(embedding, head):
        raise UserError("lm_head.weight is not wte.weight; our decoder has one embedding for input and output")
    return embedding
