"""Converts the header of a GGUF file to the content of config.json."""

import math
import re
from typing import Any

import torch
from torch import Tensor

from vlm.models.pretrained.gguf.header import Header
from vlm.nn.position import RotaryPositions

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}  # by general.architecture
# Keys after the architecture's name, and their names in config.json.
NEEDED = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
WITHOUT_EFFECT: dict[str, Any] = {  # keys that may be ignored if they have these values
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "tensor_data_layout": "Meta AI original pth",
}
NAME = re.compile(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)", re.ASCII)
MODULES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDING, HEAD, DIVISORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# The scaling of all sizes of Llama 3; a GGUF file has it as divisors of the angles of positions.
TRAINED = 8192
LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config_of(header: Header, divisors: Tensor | None) -> dict[str, Any]:
    """The content of config.json.

    Args:
        divisors: Tensor of divisors of the angles of positions, if there is one.
    Raises:
        KeyError: A value is missing.
        ValueError: The model is not supported.
    """
    kind = header.values["general.architecture"]
    if kind not in CLASSES:
        raise ValueError(f"general.architecture is {kind!r:.40}, not one of {', '.join(CLASSES)}")
    stated = {key: value for key, value in header.values.items() if key.startswith(f"{kind}.")}
    sizes = {theirs: stated.pop(f"{kind}.{key}") for key, theirs in NEEDED.items()}
    sizes |= {theirs: stated.pop(f"{kind}.{key}") for key, theirs in OPTIONAL.items() if f"{kind}.{key}" in stated}
    if wrong := next((name for name, value in sizes.items() if type(value) not in (int, float) or value <= 0), None):
        raise ValueError(f"its {wrong} is {sizes[wrong]!r:.40}, no number above 0")
    sizes.setdefault("rope_theta", 10_000.0)
    head_dim = sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    scaling = _scaling(stated.pop(f"{kind}.rope.scaling.type", "none"), stated.pop(f"{kind}.rope.scaling.factor", 1.0))
    usual = WITHOUT_EFFECT | {"rope.dimension_count": head_dim, "attention.value_length": head_dim}
    for key, value in stated.items():
        name = key.removeprefix(f"{kind}.")
        if name != "vocab_size" and (name not in usual or value != usual[name]):  # the embedding has the vocab size
            raise ValueError(f"{key} is {value!r:.40}, which our Decoder does not do")
    return sizes | {
        "model_type": kind,
        "architectures": [CLASSES[kind]],
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in header.tensors,
        "rope_scaling": scaling if divisors is None else _llama3(divisors, head_dim, sizes["rope_theta"]),
    }


def _scaling(kind: Any, factor: Any) -> dict[str, Any] | None:
    if kind == "none":
        return None
    if kind != "linear":
        raise ValueError(f"rope.scaling.type is {kind!r:.40}, not none or linear")
    return {"rope_type": kind, "factor": factor}


def _llama3(divisors: Tensor, head_dim: int, base: float) -> dict[str, Any]:
    """Llama 3's scaling; raises ValueError if the divisors are not those."""
    factor = float(divisors.max())
    if divisors.shape == (head_dim // 2,) and 1 <= factor < math.inf:
        plain = RotaryPositions(head_dim=head_dim, base=base).frequencies()
        scaled = RotaryPositions(head_dim=head_dim, base=base, scaling="llama3", factor=factor, **LLAMA3).frequencies()
        if torch.allclose(plain / scaled, divisors.float(), rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": TRAINED, **LLAMA3}
    raise ValueError(f"{DIVISORS} does not scale positions as Llama 3 does")


def folder_name(name: str) -> str:
    """The name of a tensor in a Hugging Face folder.

    Raises:
        ValueError: The tensor is unknown.
    """
    match = NAME.fullmatch(name)
    if name == HEAD:
        return "lm_head.weight"
    if match is None or match[2] not in MODULES:
        raise ValueError(f"the tensor {name!r:.60} is unknown")
    layer, module, kind = match.groups()
    return f"model.{f'layers.{layer}.' if layer else ''}{MODULES[module]}.{kind}"
