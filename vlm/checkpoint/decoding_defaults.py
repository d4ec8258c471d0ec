"""Options of decoding that a model comes with, by the names of the commands' options."""

from typing import Any

from vlm.models.pretrained.fields import Fields, choice, flag, integer, number

# Our options as generation_config.json has them.
OPTIONS = {
    "beam": integer("num_beams", high=1024),
    "length_penalty": number("length_penalty", low=-100, high=100),
    "no_repeat_ngram": integer("no_repeat_ngram_size", low=0, high=1024),
    "repetition_penalty": number("repetition_penalty", low=1e-3, high=1e3),
    "min_tokens": integer("min_new_tokens", low=0),
    "max_tokens": integer("max_new_tokens"),
    "temperature": number("temperature", high=1e3),
    "top_k": integer("top_k", low=0),
    "top_p": number("top_p"),
    "min_p": number("min_p"),
}
EARLY_STOPPING = choice("early_stopping", None, {False: False, True: True, "never": "never"})
# Options that change a text and are not ours; the values that change nothing.
REFUSED: dict[str, tuple] = {
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), (None,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), (None, [])),
    **dict.fromkeys(("force_words_ids", "constraints", "penalty_alpha"), (None, [])),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"), (None, 0)),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p"), (None, 1, 1.0)),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff", "num_beam_groups"), (None, 0, 0.0, 1)),
}
LENGTH = 20  # of a text, where a folder states none


def decoding_defaults(generation: Fields, *, prompted: bool) -> dict[str, Any]:
    """The defaults that a folder's generation_config.json states.

    Args:
        prompted: Whether texts go on from prompts, with which lengths count; those are left to the user.
    Raises:
        UserError: A value is out of its bounds, or changes texts in a way that ours does not.
    """
    for name, neutral in REFUSED.items():
        if generation.values.get(name) not in neutral:
            raise generation.fault(name, "which is not done here")
    defaults = {} if prompted else {"max_tokens": LENGTH, **_lengths(generation)}
    defaults |= {"early_stopping": generation.read(EARLY_STOPPING) or False, "end_counts": True}
    stated = {ours: generation.read(option) for ours, option in OPTIONS.items()}
    defaults |= {ours: value for ours, value in stated.items() if value is not None}
    defaults = {ours: value for ours, value in defaults.items() if value != 0 or ours not in ("top_k", "min_tokens")}
    if generation.read(flag("do_sample")):
        defaults |= {"sample": True, "top_k": defaults.get("top_k", 50)}
    return defaults


def _lengths(generation: Fields) -> dict[str, int]:
    """Lengths of texts by those that count the begin token."""
    read = {f"{end}_tokens": generation.read(integer(f"{end}_length", low=0)) for end in ("max", "min")}
    return {ours: length - 1 for ours, length in read.items() if length and length > 1}
