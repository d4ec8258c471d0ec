"""Options of decoding that a model comes with, by the names of the commands' options."""

from collections.abc import Mapping
from typing import Any

from vlm.errors import UserError
from vlm.models.pretrained.files import KEY

# Theirs -> ours, and the least and most of a value.
NAMES: dict[str, tuple[str, float, float]] = {
    "num_beams": ("beam", 1, 1024),
    "length_penalty": ("length_penalty", -100, 100),
    "no_repeat_ngram_size": ("no_repeat_ngram", 0, 1024),
    "repetition_penalty": ("repetition_penalty", 1e-3, 1e3),
    "min_new_tokens": ("min_tokens", 0, 2**20),
    "max_new_tokens": ("max_tokens", 1, 2**20),
    "temperature": ("temperature", 0, 1e3),
    "top_k": ("top_k", 0, 2**20),
    "top_p": ("top_p", 0, 1),
    "min_p": ("min_p", 0, 1),
}
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


def decoding_defaults(generation: Mapping[str, Any], folder: str, *, prompted: bool) -> dict[str, Any]:
    """The defaults that a folder's generation_config.json states.

    Args:
        prompted: Whether texts go on from prompts, with which lengths count; those are left to the user.
    Raises:
        UserError: A value is out of its bounds, or changes texts in a way that ours does not.
    """
    for name, neutral in REFUSED.items():
        if generation.get(name) not in neutral:
            raise UserError(f"{KEY}: {folder} decodes with {name}, which is not done here; take it out of its config")
    defaults: dict[str, Any] = {"early_stopping": generation.get("early_stopping") or False, "end_counts": True}
    if defaults["early_stopping"] not in (True, False, "never"):
        raise UserError(
            f"{KEY}: {folder} has early_stopping={defaults['early_stopping']!r:.40}; give true, false or never"
        )
    for theirs, (ours, low, high) in NAMES.items():
        value = generation.get(theirs)
        if value is None:
            continue
        if type(value) not in (int, float) or not low <= value <= high:
            raise UserError(f"{KEY}: {folder} has {theirs}={value!r:.40}, which is out of bounds, {low:g} to {high:g}")
        defaults[ours] = value
    for name in ("top_k", "min_tokens"):
        if defaults.get(name) == 0:
            del defaults[name]
    if not prompted:
        defaults = _lengths(generation, folder) | defaults
    if generation.get("do_sample"):
        defaults |= {"sample": True, "top_k": defaults.get("top_k", 50)}
    return defaults


def _lengths(generation: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Lengths of texts by those that count the begin token."""
    lengths = {"max_tokens": LENGTH}
    for theirs, ours in (("max_length", "max_tokens"), ("min_length", "min_tokens")):
        length = generation.get(theirs) or 0
        if type(length) is not int or not 0 <= length <= 2**20:
            raise UserError(f"{KEY}: {folder} has {theirs}={length!r:.40}, which is out of bounds, 0 to {2**20}")
        lengths |= {ours: length - 1} if length > 1 else {}
    return lengths
