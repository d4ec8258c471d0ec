"""Reads values of an untrusted JSON file by name, and the keys of config.json that change nothing."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from vlm.errors import UserError
from vlm.nn.image_size import plain
from vlm.untrusted.sizes import JsonValue

REQUIRED: Any = object()  # default of a required field
Values: TypeAlias = Mapping[str, JsonValue]  # an object of an untrusted file: every reader checks the type of a value


@dataclass(frozen=True)
class Entry:
    """A field of a file.

    Args:
        name: Its name in the file.
        default: Value if the file omits it, in the file's terms. If it is None, null also counts as omitted.
        wanted: Description of valid values.
        read: Converts the file's value to ours; raises ValueError, KeyError or TypeError if it is invalid.
        write: Converts our value to the file's; raises ValueError with the reason if there is none.
    """

    name: str
    default: JsonValue
    wanted: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value


def integer(name: str, default: JsonValue = None, low: int = 1, high: int = 2**20) -> Entry:
    return Entry(
        name, default, f"an integer from {low} to {high}", lambda value: _check_range(value, (int,), low, high)
    )


def number(name: str, default: JsonValue = None, low: float = 0, high: float = 1) -> Entry:
    return Entry(
        name, default, f"a number from {low:g} to {high:g}", lambda v: _check_range(v, (int, float), low, high)
    )


def numbers(name: str, default: JsonValue, count: int, low: float, high: float) -> Entry:
    """Returns a field for a list of `count` numbers."""

    def read(values: JsonValue) -> list[float]:
        if type(values) is not list or len(values) != count:
            raise ValueError
        return [_check_range(value, (int, float), low, high) for value in values]

    return Entry(name, default, f"a list of {count} numbers from {low:g} to {high:g}", read)


def flag(name: str, default: JsonValue = None) -> Entry:
    return Entry(name, default, "true or false", lambda value: _check_range(value, (bool,), False, True))


def text(name: str, default: JsonValue = None) -> Entry:
    def read(value: JsonValue) -> str:
        if type(value) is not str:
            raise ValueError
        return value

    return Entry(name, default, "a text", read)


def choice(name: str, default: JsonValue, options: Mapping[Any, Any]) -> Entry:
    """Returns a field with a value out of `options`, which maps theirs to ours; the first of equal ones is written."""
    inverse = {ours: theirs for theirs, ours in reversed([*options.items()])}

    def write(value: Any) -> Any:
        if value not in inverse:
            raise ValueError(f"not one of {', '.join(dict.fromkeys(options.values()))}")
        return inverse[value]

    return Entry(name, default, f"one of {', '.join(map(str, options))}", options.__getitem__, write)


def square(name: str, default: JsonValue) -> Entry:
    """Returns a field for the side of a square, given as one number or two equal ones."""

    def read(value: Any) -> int:
        sides = value if type(value) is list and len(value) == 2 else [value]
        if len({_check_range(side, (int,), 1, 4096) for side in sides}) != 1:
            raise ValueError
        return sides[0]

    def write(value: Any) -> Any:
        if not isinstance(value, int):
            raise ValueError("not a square")
        return value

    return Entry(name, default, "the side of a square, from 1 to 4096", read, write)


def image_size(name: str, default: JsonValue) -> Entry:
    """Returns a field for the side of square images, or their height and width."""

    def read(value: JsonValue) -> int | list[int]:
        given = value if type(value) is list and len(value) == 2 else [value]
        height, width = (given * 2)[:2]
        return plain((_check_range(height, (int,), 1, 4096), _check_range(width, (int,), 1, 4096)))

    return Entry(name, default, "a side, or height and width, from 1 to 4096", read)


def _check_range(value: Any, kinds: tuple[type, ...], low: float, high: float) -> Any:
    if type(value) not in kinds or not low <= value <= high:
        raise ValueError
    return value


class Fields:
    """An object of a JSON file that records which keys are read.

    Args:
        values: Its content.
        file: The file's path.
        within: Path of the object in the file, such as "text_config.".
        used: Paths of the keys that were read in the whole file, such as "text_config.hidden_size"; default none.
    """

    def __init__(self, values: Values, file: str, within: str = "", used: set[str] | None = None) -> None:
        self.values, self.file, self.within = values, file, within
        self.used: set[str] = set() if used is None else used

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def __or__(self, values: Values) -> "Fields":
        """Returns a copy with some values replaced."""
        return Fields({**self.values, **values}, self.file, self.within, self.used)

    def get(self, name: str, default: JsonValue = None) -> Any:
        """Returns the value of a key, unchecked."""
        self.used.add(f"{self.within}{name}")
        return self.values.get(name, default)

    def read(self, field: Entry) -> Any:
        """Returns the value of a field, converted to ours.

        Raises:
            UserError: It is missing or invalid.
        """
        value = self.get(field.name, field.default)
        if value is REQUIRED:
            raise UserError(f"{self.file}: has no {self.within}{field.name}; choose another folder")
        if value is None and field.default is None:
            return None
        try:
            return field.read(value)
        except (ValueError, KeyError, TypeError):
            raise self.error(field.name, f"not {field.wanted}") from None

    def part(self, name: str, default: Values | None = None) -> "Fields":
        """Returns an object inside this one.

        Raises:
            UserError: It is missing and has no default, or is not an object.
        """
        value = self.get(name, default)
        if not isinstance(value, Mapping):
            if value is None:
                raise UserError(f"{self.file}: has no {self.within}{name}; choose another folder")
            raise self.error(name, "not an object")
        return Fields(value, self.file, f"{self.within}{name}.", self.used)

    def require(self, needed: Values, who: str) -> None:
        """Checks that fields have the needed values, or are omitted.

        Args:
            who: Name of our class that does not support other values.
        Raises:
            UserError: One has another value.
        """
        for name, value in needed.items():
            if self.get(name, value) != value:
                raise self.error(name, f"which {who} does not support")

    def error(self, name: str, words: str) -> UserError:
        """Returns a one-line error about a value."""
        value = " ".join(f"{self.values.get(name)!r:.60}".split())
        return UserError(f"{self.file}: {self.within}{name} is {value}, {words}; choose another folder")


OFF_VALUES: tuple[JsonValue, ...] = (None, False, {}, [])  # values with which a key has no effect
# Neutral with any value. Rates of dropout, initial values and gradient checkpointing matter in training only, which has
# its own settings here.
DROPOUTS = {
    *("activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classif_dropout"),
    *("classifier_dropout", "classifier_dropout_prob", "decoder_layerdrop", "drop_path_rate", "dropout"),
    *("dropout_rate", "embd_pdrop", "encoder_layerdrop", "hidden_dropout", "hidden_dropout_prob", "layerdrop"),
    *("qa_dropout", "resid_pdrop", "seq_classif_dropout", "summary_first_dropout", "neftune_noise_alpha"),
}
INITIALIZATION = {"initializer_factor", "initializer_range", "init_std", "logit_scale_init_value", "layerscale_value"}
TRAINING = {
    "gradient_checkpointing",
    "label_smoothing",
    "use_reentrant_checkpoints",
    "ignore_index",
    *DROPOUTS,
    *INITIALIZATION,
}
# Where a config comes from, what its classes return, how they compute it.
DESCRIPTION = {
    *("architectures", "model_type", "transformers_version", "name_or_path", "processor_class", "tokenizer_class"),
    *("finetuning_task", "task_specific_params", "model_max_length", "transformers.js_config", "is_llama_config"),
    *("torch_dtype", "dtype", "use_bfloat16", "torchscript", "return_dict", "use_return_dict", "output_past"),
    *("output_attentions", "output_hidden_states", "tie_last_hidden_states", "chunk_size_feed_forward", "use_cache"),
    *("attn_implementation", "experts_implementation", "unsloth_fixed", "unsloth_version", "pretraining_tp"),
    *("id2label", "label2id", "num_labels", "problem_type", "tie_word_embeddings"),  # which models with heads read
}
# Read elsewhere: ids and decoding options by Folder.generation, quantisation where the weights are read.
ELSEWHERE = {
    *("bos_token_id", "cls_token_id", "eos_token_id", "mask_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
    *("decoder_start_token_id", "prefix"),
    *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
    *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id"),
    *("forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "min_new_tokens"),
    *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores"),
    *("remove_invalid_values", "renormalize_logits", "repetition_penalty", "return_dict_in_generate"),
    *("suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "quantization_config"),
}
COMMON = TRAINING | DESCRIPTION | ELSEWHERE


def refuse_unread_keys(config: Fields, neutral: Mapping[str, Collection[str]]) -> None:
    """Checks that every key of a config was read, or is neutral.

    Args:
        config: A config all of whose readers have run.
        neutral: By the path of an object in the file: its keys that are neutral with any value, besides COMMON.
    Raises:
        UserError: One is neither; its value may change what the model computes.
    """
    for fields, name in _find_unread(config, neutral):
        raise fields.error(name, "a key that vlm does not support")


def _find_unread(config: Fields, neutral: Mapping[str, Collection[str]]) -> Iterable[tuple[Fields, str]]:
    neutral_here: Collection[str] = COMMON.union(neutral[config.within]) if config.within in neutral else ()
    for name, value in config.values.items():
        is_off = any(value is off or (type(value) is type(off) and value == off) for off in OFF_VALUES)
        if name in neutral_here or name.startswith("_") or is_off:
            continue
        path = f"{config.within}{name}"
        if isinstance(value, Mapping) and any(read.startswith(f"{path}.") for read in config.used):
            yield from _find_unread(config.part(name), neutral)
        elif path not in config.used:
            yield config, name
