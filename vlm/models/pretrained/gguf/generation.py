"""Converts the header of a GGUF file to the content of generation_config.json: end tokens and sampling options."""

from collections.abc import Mapping, Sequence
from typing import Any

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
