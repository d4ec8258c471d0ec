"""Converts the header of a GGUF file to config.json and generation_config.json."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlm.models.pretrained.gguf.header import NUMBER, Allowed, Header, check_keys
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
SIZE_KEYS = {theirs: key for key, theirs in (NEEDED | OPTIONAL).items()}
FACTORS, LARGEST_FACTOR = ("scaling.factor", "scale_linear"), 10_000
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
    sizes: dict[str, Any] = {theirs: _size(header.values, f"{kind}.{key}") for key, theirs in NEEDED.items()}
    optional = {theirs: f"{kind}.{key}" for key, theirs in OPTIONAL.items() if f"{kind}.{key}" in header.values}
    sizes |= {theirs: _size(header.values, key) for theirs, key in optional.items()}
    sizes.setdefault("rope_theta", 10_000.0)
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    if kind == "llama":
        head_dim = sizes.setdefault("head_dim", head_dim)
    rows, *_ = header.tensors[EMBEDDING].shape or (0,)
    check_keys(header.values, header.tensors, _other_keys(kind, sizes, head_dim, rows))
    if head_dim % 2:
        raise ValueError(f"{kind}.attention.key_length is {head_dim}, an odd number, which cannot be rotated")
    if kind != "llama":
        sizes.pop("head_dim", None)  # it is the usual one
    return sizes | {
        "model_type": kind,
        "architectures": [CLASSES[kind]],
        "vocab_size": rows,
        "tie_word_embeddings": HEAD not in header.tensors,
        "rope_scaling": _scaling(header.values, kind, divisors, head_dim, sizes["rope_theta"]),
    }


def _size(values: Mapping[str, Any], key: str) -> int | float:
    """A number above 0; equal numbers for all layers count as one."""
    value = values[key]
    if isinstance(value, list) and value and value == [value[0]] * values.get(f"{key.split('.')[0]}.block_count", 0):
        value = value[0]
    kinds = (int, float) if key.endswith(("epsilon", "freq_base")) else (int,)
    if type(value) not in kinds or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r:.40}, no number above 0")
    return value


def _other_keys(kind: str, sizes: Mapping[str, Any], head_dim: int, rows: int) -> dict[str, Allowed]:
    """Allowed values of the architecture's keys, by the name after the architecture."""
    known: dict[str, Allowed] = dict.fromkeys((*NEEDED, *OPTIONAL), (int, float, list))
    if kind != "llama":
        known["attention.key_length"] = [head_dim]
    known |= {"rope.dimension_count": [head_dim], "attention.value_length": [head_dim]}
    known |= {"rope.scaling.type": ["none", "linear"], **{f"rope.{name}": NUMBER for name in FACTORS}}
    return known | {"vocab_size": [rows], "embedding_length_out": [sizes["hidden_size"]]}


def _scaling(
    values: Mapping[str, Any], kind: str, divisors: Tensor | None, head_dim: int, base: float
) -> dict[str, Any] | None:
    """Linear scaling, which is the default of a file that states a factor, or Llama 3's."""
    key = next((f"{kind}.rope.{name}" for name in FACTORS if f"{kind}.rope.{name}" in values), "")
    factor = values.get(key) or 1
    if values.get(f"{kind}.rope.scaling.type") == "none":
        factor = 1
    if not 1 <= factor <= LARGEST_FACTOR or (divisors is not None and factor != 1):
        other = f" and no {DIVISORS}" if divisors is not None else ""
        raise ValueError(f"{key} is {factor!r:.40}, not a number from 1 to {LARGEST_FACTOR:,}{other}")
    if divisors is not None and kind != "llama":
        raise ValueError(f"the tensor {DIVISORS!r} is not one of {kind}")
    if divisors is not None:
        return _llama3(divisors, head_dim, base)
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _llama3(divisors: Tensor, head_dim: int, base: float) -> dict[str, Any]:
    """Llama 3's scaling; raises ValueError if the divisors are not those."""
    factor = float(divisors.max())
    if divisors.shape == (head_dim // 2,) and 1 <= factor < math.inf:
        plain = RotaryPositions(head_dim=head_dim, base=base).frequencies()
        scaled = RotaryPositions(head_dim=head_dim, base=base, scaling="llama3", factor=factor, **LLAMA3).frequencies()
        if torch.allclose(plain / scaled, divisors.float(), rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": TRAINED, **LLAMA3}
    raise ValueError(f"{DIVISORS} does not scale positions as Llama 3 does")


KEY = "tokenizer.ggml."
NAMED_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
IDS = {"bos_token_id": "bos_token_id", "padding_token_id": "pad_token_id"}  # names in generation_config.json
SUPPRESSED = f"{KEY}suppress_tokens"
# Options of generation_config.json, and the keys that the converter of llama.cpp makes of them.
OPTION_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
SENTENCE_PIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2}  # llama.cpp's defaults for tokenizer.ggml.model = llama
# Texts of tokens that llama.cpp ends a generation at, whether the header names them or not. The lists and their
# exceptions are those of llama.cpp as llama-cpp-python 0.3.36 ships it (src/llama-vocab.cpp).
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
# Tokens of models that fill gaps in code: llama.cpp takes the one that the header names, or else one with such a text.
INFILL_ENDS = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
# A text is no end if the ends have one of each group: {text: alternatives, each a sequence of groups}.
NOT_ENDS: dict[str, tuple[tuple[set[str], ...], ...]] = {
    "<|end|>": (({"<|return|>"}, {"<|call|>", "<|calls|>"}), ({"<|call|>", "<|calls|>"}, {"<|flush|>"})),
    "</s>": (({"<|tool_response>", "<|plamo:eos|>"},),),
}


def find_ends(values: Mapping[str, Any]) -> list[int]:
    """Returns the tokens that end a generation: those that the header names first, then those with a known text.

    Raises:
        KeyError: The header has no end token.
        ValueError: An id is not in the vocabulary.
    """
    tokens: Sequence[Any] = values[f"{KEY}tokens"]
    ids = {token: id for id, token in enumerate(tokens) if isinstance(token, str)}
    named = [stated_id(values, name) for name in NAMED_ENDS]
    for name, texts in INFILL_ENDS.items():
        inferred = min((ids[text] for text in texts if text in ids), default=None)
        named.append(inferred if (stated := stated_id(values, name)) is None else stated)
    ends = [*named, *sorted(ids[text] for text in END_TEXTS if text in ids)]
    found = list(dict.fromkeys(end for end in ends if end is not None))
    held = {tokens[end] for end in found}
    for text, alternatives in NOT_ENDS.items():
        if text in held and any(all(held & group for group in groups) for groups in alternatives):
            found = [end for end in found if tokens[end] != text]
    if not found:
        raise KeyError(f"{KEY}eos_token_id")
    return found


def stated_id(values: Mapping[str, Any], name: str) -> int | None:
    """Returns a token that the header names; None if it does not.

    Raises:
        ValueError: It is not in the vocabulary.
    """
    default = SENTENCE_PIECE_IDS.get(name) if values.get(f"{KEY}model") == "llama" else None
    id = values.get(f"{KEY}{name}", default)
    if id is not None and (type(id) is not int or not 0 <= id < len(values[f"{KEY}tokens"])):
        raise ValueError(f"{KEY}{name} is {id!r:.40}, which is outside the vocabulary")
    return id


def generation_of(values: Mapping[str, Any], ends: Sequence[int]) -> dict[str, Any]:
    """The content of generation_config.json.

    Raises:
        ValueError: An id is not in the vocabulary.
    """
    made: dict[str, Any] = {"eos_token_id": [*ends]}
    made |= {theirs: stated_id(values, name) for name, theirs in IDS.items()}
    for name, key in OPTION_KEYS.items():
        if key in values:  # seven digits, because a header has numbers of 32 bits
            made[name] = float(f"{values[key]:.7g}") if isinstance(values[key], float) else values[key]
    if outside := [id for id in values.get(SUPPRESSED, ()) if id not in range(len(values[f"{KEY}tokens"]))]:
        raise ValueError(f"{SUPPRESSED} has {outside[0]!r:.40}, which is outside the vocabulary")
    return made | {"bad_words_ids": [[id] for id in values.get(SUPPRESSED, ())]}
