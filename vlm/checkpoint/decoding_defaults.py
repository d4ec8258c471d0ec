"""Decoding options that a model's folder states, by the names of the commands' options."""

from typing import Any

from vlm.models.pretrained.fields import Fields, choice, flag, integer, number

# Options of vlm, each with its field in generation_config.json.
OPTIONS = {
    "beam": integer("num_beams", high=1024),
    "length_penalty": number("length_penalty", low=-100, high=100),
    "no_repeat_ngram": integer("no_repeat_ngram_size", low=0, high=1024),
    "repetition_penalty": number("repetition_penalty", low=1e-3, high=1e3),
    "min_tokens": integer("min_new_tokens", low=0),
    "max_tokens": integer("max_new_tokens"),
    "temperature": number("temperature", high=1e3),
    "top_k": integer("top_k", low=-1),
    "top_p": number("top_p"),
    "min_p": number("min_p"),
}
EARLY_STOPPING = choice("early_stopping", None, {False: False, True: True, "never": "never"})
# Options that change a text and are not supported, with their values that change nothing.
REFUSED: dict[str, tuple] = {
    "forced_bos_token_id": (None,),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "sequence_bias"), (None, [])),
    **dict.fromkeys(("force_words_ids", "constraints", "penalty_alpha"), (None, [])),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"), (None, 0)),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p"), (None, 1, 1.0)),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff", "num_beam_groups"), (None, 0, 0.0, 1)),
    **dict.fromkeys(("top_h", "max_time", "watermarking_config", "dola_layers"), (None,)),
    "stop_strings": (None, [], ""),
    "guidance_scale": (None, 1, 1.0),
    "token_healing": (None, False),
    "cache_implementation": (None, "dynamic", "static", "offloaded", "offloaded_static", "hybrid", "sliding_window"),
}
LENGTH = 20  # default number of tokens, if a folder states none


def decoding_defaults(generation: Fields, *, prompted: bool) -> dict[str, Any]:
    """Returns the defaults in a folder's generation_config.json.

    Args:
        prompted: Whether texts continue prompts. The stated lengths would then include the prompt, and are left to the
            user.
    Raises:
        UserError: A value is out of bounds, or changes texts in a way that is not supported.
    """
    for name, neutral in REFUSED.items():
        if generation.values.get(name) not in neutral:
            raise generation.fault(name, "which is not done here")
    defaults = {} if prompted else {"max_tokens": LENGTH, **_lengths(generation)}
    defaults |= {"early_stopping": generation.read(EARLY_STOPPING) or False, "end_counts": True}
    stated = {ours: generation.read(option) for ours, option in OPTIONS.items()}
    defaults |= {ours: value for ours, value in stated.items() if value is not None}
    defaults = {ours: value for ours, value in defaults.items() if value != 0 or ours != "min_tokens"}
    defaults |= _ends_and_bans(generation)
    if generation.read(flag("do_sample")):
        defaults |= {"sample": True, "top_k": defaults.get("top_k", 50)}
    return defaults


def _ends_and_bans(generation: Fields) -> dict[str, Any]:
    """Returns whether the last token must be the end token, and the tokens that are never generated.

    A ban applies before probabilities are computed, as with `renormalize_logits`, which Marian's folders state.
    """
    end, banned = generation.values.get("forced_eos_token_id"), generation.values.get("bad_words_ids") or []
    if end not in (None, generation.values.get("eos_token_id")):
        raise generation.fault("forced_eos_token_id", "not the end token")
    listed = isinstance(banned, list) and all(isinstance(words, list) and len(words) == 1 for words in banned)
    tokens = [token for (token,) in banned] if listed else [None]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise generation.fault("bad_words_ids", "not a list of single tokens")
    return ({} if end is None else {"forced_end": True}) | ({"never": tokens} if tokens else {})


def _lengths(generation: Fields) -> dict[str, int]:
    """Converts stated lengths, which include the begin token, to numbers of tokens without it."""
    read = {f"{end}_tokens": generation.read(integer(f"{end}_length", low=0)) for end in ("max", "min")}
    return {ours: length - 1 for ours, length in read.items() if length and length > 1}
