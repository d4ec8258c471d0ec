"""Checks every key of a GGUF header: it is used, has a value that changes nothing, or is refused by its name.

The keys are those of llama.cpp as llama-cpp-python 0.3.36 ships it (src/llama-arch.cpp, gguf-py/gguf/constants.py).
"""

from collections.abc import Mapping
from typing import Any

from vlm.models.pretrained.gguf.header import Place

NUMBER = (int, float)
# Allowed values: a type or a tuple of types for any value of these, or a list of values.
Allowed = type | tuple[type, ...] | list[Any]
TOKENIZER_IDS = (
    *("bos", "eos", "eot", "eom", "padding", "unknown", "seperator", "cls", "mask", "prefix", "suffix", "middle"),
    *("fim_pad", "fim_rep", "fim_sep", "fim_pre", "fim_suf", "fim_mid"),
)
GENERAL: dict[str, Allowed] = {
    "architecture": str,
    "type": ["model"],
    "alignment": int,
    "file_type": int,
    "quantization_version": int,  # compared with the types of tensors
    "sampling.temp": NUMBER,
    "sampling.top_k": int,
    "sampling.top_p": NUMBER,
    "sampling.min_p": NUMBER,
    "sampling.penalty_repeat": NUMBER,
    "sampling.penalty_last_n": [-1],
    "sampling.xtc_probability": [0],
    "sampling.xtc_threshold": NUMBER,
    "sampling.mirostat": [0],
    "sampling.mirostat_tau": NUMBER,
    "sampling.mirostat_eta": NUMBER,
}
TOKENIZER: dict[str, Allowed] = {
    "ggml.model": str,
    "ggml.pre": str,
    "ggml.tokens": list,
    "ggml.token_type": list,
    "ggml.token_type_count": int,  # of BERT
    "ggml.scores": list,
    "ggml.merges": list,
    **{f"ggml.{name}_token_id": int for name in TOKENIZER_IDS},
    "ggml.add_bos_token": bool,
    "ggml.add_eos_token": [False],
    "ggml.add_sep_token": [False],
    "ggml.add_space_prefix": bool,
    "ggml.remove_extra_whitespaces": bool,
    "ggml.suppress_tokens": list,
    "ggml.normalizer.lowercase": [False],
    "ggml.normalizer.strip_accents": [False],
    "chat_template": str,
    "chat_templates": list,  # names of further templates
    "huggingface.json": str,  # a copy of the tokenizer
}
BYTE_PAIRS: dict[str, Allowed] = {"ggml.add_space_prefix": [False], "ggml.remove_extra_whitespaces": [False]}
SPLIT: dict[str, Allowed] = dict.fromkeys(("no", "count", "tensors.count"), int)
# Keys of the architecture that change nothing.
ARCHITECTURE: dict[str, Allowed] = {
    "attention.causal": [True],
    "attention.sliding_window": [0],
    "attention.clamp_kqv": [0],
    "attention.max_alibi_bias": [0],
    "attention.shared_kv_layers": [0],
    "attn_logit_softcapping": [0],
    "final_logit_softcapping": [0],
    "expert_count": [0],
    "expert_used_count": [0],
    "expert_shared_count": [0],
    "expert_group_count": [0],
    "expert_group_used_count": [0],
    "nextn_predict_layers": [0],
    "pooling_type": [0],
    "use_parallel_residual": [False],
    "tensor_data_layout": ["Meta AI original pth"],
    "rope.scaling.attn_factor": [1],
    "rope.scaling.yarn_attn_factor": [1],
    "rope.scaling.yarn_log_multiplier": [0],
    # How a model was trained, and settings of a scaling (YaRN) that is refused by its type.
    "rope.scaling.finetuned": bool,
    "rope.scaling.original_context_length": int,
    "rope.scaling.yarn_beta_fast": NUMBER,
    "rope.scaling.yarn_beta_slow": NUMBER,
}
# Where a model comes from and how it was quantised: texts for people.
DESCRIPTIONS = (
    *("name", "author", "version", "organization", "finetune", "basename", "description", "quantized_by"),
    *("size_label", "license", "url", "doi", "uuid", "repo_url", "source", "base_model", "dataset", "datasets"),
    *("tags", "languages", "parameter_count"),
)
FREE_GROUPS = ("quantize", "imatrix", "mradermacher")
QUANTISATION = 2  # version of the types of tensors; older ones have the same names and other bytes
PLAIN_KINDS = (0, 1, 30)  # numbers of F32, F16, BF16


def check_keys(values: Mapping[str, Any], tensors: Mapping[str, Place], read: Mapping[str, Allowed]) -> None:
    """Checks all keys of a header.

    Args:
        read: Allowed values of further keys of the architecture, which depend on its sizes.
    Raises:
        ValueError: A key is unknown, or its value is not supported.
    """
    kind = values["general.architecture"]
    known = {f"general.{name}": allowed for name, allowed in GENERAL.items()}
    known |= {f"tokenizer.{name}": allowed for name, allowed in TOKENIZER.items()}
    if values.get("tokenizer.ggml.model") != "llama":
        known |= {f"tokenizer.{name}": allowed for name, allowed in BYTE_PAIRS.items()}
    known |= {f"split.{name}": allowed for name, allowed in SPLIT.items()}
    if any(place.kind not in PLAIN_KINDS for place in tensors.values()):
        known["general.quantization_version"] = [QUANTISATION]
    if values.get("general.sampling.penalty_repeat", 1) == 1:
        known["general.sampling.penalty_last_n"] = int
    known |= {f"{kind}.{name}": allowed for name, allowed in (ARCHITECTURE | dict(read)).items()}
    for key, value in values.items():
        if key in known:
            if not _is_allowed(value, known[key]):
                raise ValueError(f"{key} is {value!r:.40}, {_wanted(known[key])}")
        elif not _is_description(key):
            raise ValueError(f"{key} is {value!r:.40}, a key that is not supported")


def _is_allowed(value: Any, allowed: Allowed) -> bool:
    if isinstance(allowed, list):
        return value in allowed
    return type(value) in (allowed if isinstance(allowed, tuple) else (allowed,))


def _wanted(allowed: Allowed) -> str:
    if isinstance(allowed, list):
        return f"which is not supported; it may be {' or '.join(map(repr, allowed))}"
    kinds = allowed if isinstance(allowed, tuple) else (allowed,)
    return f"not of type {' or '.join(kind.__name__ for kind in kinds)}"


def _is_description(key: str) -> bool:
    group, _, name = key.partition(".")
    if group == "tokenizer":
        return name.startswith("chat_template.")  # further templates, for tools for example
    return group in FREE_GROUPS or (group == "general" and name.split(".")[0] in DESCRIPTIONS)
