"""Decoders that GGUF files store: the keys of their sizes, the names of their tensors, and how values differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

DecoderConfig: TypeAlias = dict[str, Any]  # content of a decoder's config.json
EMBEDDING, HEAD, DIVISORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
Table: TypeAlias = Mapping[str, tuple[str, tuple[str, ...]]]  # names in a file -> names in a folder, and axes
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
GPT2_NEEDED = {
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "context_length": "n_positions",
}
SIZE_KEYS = {theirs: key for table in (NEEDED, OPTIONAL, GPT2_NEEDED) for key, theirs in table.items()}
# Tensors outside the layers and those of a layer: names in a folder, and axes.
OUTER: Table = {
    EMBEDDING: ("model.embed_tokens.weight", ("vocab", "width")),
    "output_norm.weight": ("model.norm.weight", ("width",)),
}
UNTIED: Table = {HEAD: ("lm_head.weight", ("vocab", "width"))}  # only if it is not the embedding
LAYER: Table = {
    "attn_norm.weight": ("input_layernorm.weight", ("width",)),
    "attn_q.weight": ("self_attn.q_proj.weight", ("queries", "width")),
    "attn_k.weight": ("self_attn.k_proj.weight", ("keys", "width")),
    "attn_v.weight": ("self_attn.v_proj.weight", ("keys", "width")),
    "attn_output.weight": ("self_attn.o_proj.weight", ("width", "queries")),
    "ffn_norm.weight": ("post_attention_layernorm.weight", ("width",)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", ("hidden", "width")),
    "ffn_up.weight": ("mlp.up_proj.weight", ("hidden", "width")),
    "ffn_down.weight": ("mlp.down_proj.weight", ("width", "hidden")),
}
BIASES: Table = {
    "attn_q.bias": ("self_attn.q_proj.bias", ("queries",)),
    "attn_k.bias": ("self_attn.k_proj.bias", ("keys",)),
    "attn_v.bias": ("self_attn.v_proj.bias", ("keys",)),
}
HEAD_NORMS: Table = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", ("head",)),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", ("head",)),
}
GPT2_OUTER: Table = {
    EMBEDDING: ("transformer.wte.weight", ("vocab", "width")),
    "position_embd.weight": ("transformer.wpe.weight", ("positions", "width")),
    "output_norm.weight": ("transformer.ln_f.weight", ("width",)),
    "output_norm.bias": ("transformer.ln_f.bias", ("width",)),
}
GPT2_LAYER: Table = {
    "attn_norm.weight": ("ln_1.weight", ("width",)),
    "attn_norm.bias": ("ln_1.bias", ("width",)),
    "attn_qkv.weight": ("attn.c_attn.weight", ("qkv", "width")),
    "attn_qkv.bias": ("attn.c_attn.bias", ("qkv",)),
    "attn_output.weight": ("attn.c_proj.weight", ("width", "width")),
    "attn_output.bias": ("attn.c_proj.bias", ("width",)),
    "ffn_norm.weight": ("ln_2.weight", ("width",)),
    "ffn_norm.bias": ("ln_2.bias", ("width",)),
    "ffn_up.weight": ("mlp.c_fc.weight", ("hidden", "width")),
    "ffn_up.bias": ("mlp.c_fc.bias", ("hidden",)),
    "ffn_down.weight": ("mlp.c_proj.weight", ("width", "hidden")),
    "ffn_down.bias": ("mlp.c_proj.bias", ("width",)),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A decoder by its `general.architecture`, which is also its model_type.

    Args:
        saved_as: Its Hugging Face class.
        needed, optional: Keys of sizes after the architecture's name, with their names in config.json.
        outer, layer: Tensors outside the layers, and those of a layer.
        layers: Name of the list of layers in a folder.
        untied: Tensor of a head besides the embedding; empty if llama.cpp always uses the embedding.
        activation: Field of the activation in config.json, and the values that compute what llama.cpp does.
        rotary: Whether positions are rotary, not learned.
        permuted: Whether the two halves of each head of queries and keys alternate in a file.
        norm_offset: What a file's weights of norms have more than a folder's.
        transposed: Whether a folder stores linear layers as (inputs, outputs).
    """

    saved_as: str
    needed: Mapping[str, str] = field(default_factory=lambda: NEEDED)
    optional: Mapping[str, str] = field(default_factory=lambda: OPTIONAL)
    outer: Table = field(default_factory=lambda: OUTER)
    layer: Table = field(default_factory=lambda: LAYER)
    layers: str = "model.layers"
    untied: Table = field(default_factory=lambda: UNTIED)
    activation: tuple[str, tuple[str, ...]] = ("hidden_act", ("silu", "swish"))
    rotary: bool = True
    permuted: bool = False
    norm_offset: int = 0
    transposed: bool = False


TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
LLAMA = Family(saved_as="LlamaForCausalLM", permuted=True)
QWEN3 = replace(LLAMA, saved_as="Qwen3ForCausalLM", permuted=False, layer={**LAYER, **HEAD_NORMS})
FAMILIES = {
    "llama": LLAMA,
    "qwen2": replace(
        LLAMA,
        saved_as="Qwen2ForCausalLM",
        permuted=False,
        layer={**LAYER, **BIASES},
        optional={key: name for key, name in OPTIONAL.items() if name != "head_dim"},
    ),
    "qwen3": QWEN3,
    "gemma": Family(
        saved_as="GemmaForCausalLM",
        untied={},
        activation=("hidden_act", ("gelu_pytorch_tanh",)),
        norm_offset=1,
    ),
    "gpt2": Family(
        saved_as="GPT2LMHeadModel",
        needed=GPT2_NEEDED,
        optional={},
        outer=GPT2_OUTER,
        layer=GPT2_LAYER,
        layers="transformer.h",
        activation=("activation_function", TANH_GELU),
        rotary=False,
        transposed=True,
    ),
}


class StoredTensor(NamedTuple):
    """A tensor of a decoder: its names in a file and in a folder, and its shape in the file."""

    name: str
    in_folder: str
    shape: tuple[int, ...]


def read_sizes(config: DecoderConfig) -> dict[str, int]:
    """Returns the sizes of a decoder's axes."""
    family = FAMILIES[config["model_type"]]
    width, layers, hidden, heads, _, positions = (config[name] for name in family.needed.values())
    head = config.get("head_dim") or width // heads
    keys = (config.get("num_key_value_heads") or heads) * head
    sizes = {"width": width, "layers": layers, "hidden": hidden or 4 * width, "heads": heads, "positions": positions}
    return sizes | {
        "head": head,
        "queries": heads * head,
        "keys": keys,
        "qkv": heads * head + 2 * keys,
        "vocab": config["vocab_size"],
    }


def list_tensors(config: DecoderConfig, *, untied: bool) -> Iterator[StoredTensor]:
    """Yields the tensors of a decoder; lazily, because a file may claim any number of layers.

    Args:
        untied: Whether it has a head that is not its embedding.
    """
    family, sizes = FAMILIES[config["model_type"]], read_sizes(config)
    layers = (
        (f"blk.{layer}.{name}", (f"{family.layers}.{layer}.{theirs}", axes))
        for layer in range(sizes["layers"])
        for name, (theirs, axes) in family.layer.items()
    )
    outer = {**family.outer, **(family.untied if untied else {})}
    for name, (theirs, axes) in chain(outer.items(), layers):
        yield StoredTensor(name, theirs, tuple(sizes[axis] for axis in axes))


def convert_from_file(stored: StoredTensor, tensor: Tensor, config: DecoderConfig) -> Tensor:
    """Converts a file's tensor to a folder's."""
    family = FAMILIES[config["model_type"]]
    if heads := _count_permuted_heads(stored, config):
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    if family.norm_offset and "norm" in stored.name:
        return tensor.float() - family.norm_offset
    return tensor.t() if _is_transposed(stored, family) else tensor


def convert_to_file(stored: StoredTensor, tensor: Tensor, config: DecoderConfig) -> Tensor:
    """Converts a folder's tensor to a file's; the inverse of `convert_from_file`."""
    family = FAMILIES[config["model_type"]]
    if heads := _count_permuted_heads(stored, config):
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if family.norm_offset and "norm" in stored.name:
        return tensor.float() + family.norm_offset
    return tensor.t() if _is_transposed(stored, family) else tensor


def _count_permuted_heads(stored: StoredTensor, config: DecoderConfig) -> int:
    """Returns the number of heads in which two halves alternate; 0 for all other tensors."""
    if not FAMILIES[config["model_type"]].permuted:
        return 0
    heads = config["num_attention_heads"]
    kinds = {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads}
    return kinds.get(stored.name.removesuffix(".weight").rpartition(".")[2], 0)


def _is_transposed(stored: StoredTensor, family: Family) -> bool:
    return family.transposed and stored.name.startswith("blk.") and len(stored.shape) == 2
