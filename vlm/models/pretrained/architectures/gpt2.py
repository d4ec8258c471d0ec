"""GPT-2 (Radford et al. 2019), alone or with cross-attention to an encoder."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vlm.models.decoder import Decoder
from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.stack import ACTIVATION_NAMES, Names, Part, Sources, Stack, modules, same, tied

LAYERS = {
    "norm1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
CROSS_LAYERS = {
    "norm_cross": "ln_cross_attn",
    "cross_attn.q": "crossattention.q_attn",
    "cross_attn.kv": "crossattention.c_attn",
    "cross_attn.proj": "crossattention.c_proj",
}


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    dim = config.get("n_embd", 768)
    return {
        "dim": dim,
        "depth": config.get("n_layer", 12),
        "num_heads": config.get("n_head", 12),
        "mlp_ratio": (config.get("n_inner") or 4 * dim) / dim,
        "activation": ACTIVATION_NAMES.get(config.get("activation_function", "gelu_new")),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "vocab_size": config.get("vocab_size", 50257),
        "max_len": config.get("n_positions", 1024),
    }


def sources(decoder: Decoder, names: Names) -> Sources:
    """Its cross-attention too, where GPT-2 has one; if not, that stays as it is."""
    crossing = any(".crossattention." in name for name in names)
    tensors: Sources = {
        "token_embed.weight": (("wte.weight",), same),
        # A text that fits has its first positions, however many there are after them.
        "positions.weight": (("wpe.weight",), lambda table: table[: decoder.max_len]),
        **modules({"norm": "ln_f"}),
    }
    for number, block in enumerate(decoder.blocks):
        crossed = crossing and getattr(block, "cross_attn", None) is not None
        table = LAYERS | (CROSS_LAYERS if crossed else {})
        tensors |= modules(table, ours=f"blocks.{number}.", theirs=f"h.{number}.", make=_transposed)
    return tensors


def _transposed(name: str, kind: str) -> Callable[[Tensor], Tensor]:
    """GPT-2's linear layers hold their weights transposed."""
    return torch.t if kind == "weight" and "norm" not in name else same


def head(decoder: Decoder, names: Names) -> Sources:
    if "lm_head.weight" not in names:
        return {}
    return {"token_embed.weight": (("transformer.wte.weight", "lm_head.weight"), tied)}


GPT2 = Stack(
    kind=Decoder,
    stem="transformer.",
    sizes=sizes,
    sources=sources,
    head=head,
    needed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
)
ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": Part(GPT2, config)},
    models={"GPT2LMHeadModel": Model("language_modeling", lambda config, specs: specs["decoder"])},
)
