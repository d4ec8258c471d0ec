"""Options of the commands, each declared once. torch is imported only when a command runs."""

import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, cast, get_type_hints

from vlm.checkpoint.locate import check_adapters, check_checkpoint, check_projector, find_best_checkpoint, join_places
from vlm.errors import Range, UserError, did_you_mean, find_similar
from vlm.machine import paused_collection

if TYPE_CHECKING:
    from vlm.checkpoint.stored import DecodingDefaults
    from vlm.data.text.tokenizer import Tokenizer
    from vlm.decoding.constraints import Rules
    from vlm.decoding.options import Decoding
    from vlm.decoding.sampling import Sampling

Loaded = TypeVar("Loaded")
OptionsType = TypeVar("OptionsType", bound="Options | SamplingOptions")
Item = TypeVar("Item")
Kind = Literal["text", "image"]


@dataclass(frozen=True)
class Option:
    """An option of a command, in the annotation of a dataclass field with its type and default.

    Args:
        help: Its line in --help.
        flags: Names on the command line, such as "-c". By default, that of the field.
        least, most: Minimum and maximum.
        metavar: The name of its value in --help.
        positional: Whether it is an argument without a name on the command line.
        cli_type: Its type on the command line, if that differs from the annotation.
        input_kind: text or image if it is a part of the input (a question, a second text, a photo); None for a setting.
        scope: Who may set it: "anyone"; "machine": a command or Python, but no client of a service; "command": only the
            command line.
        choices: Allowed values on the command line. By default, all.
        check: Called with its value on a command line before the command runs, because importing torch takes seconds.
        convert: Converts its value on a command line, such as by reading a file.
    """

    help: str
    flags: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    metavar: str | None = None
    positional: bool = False
    cli_type: type | None = None
    input_kind: Kind | None = None
    scope: Literal["anyone", "machine", "command"] = "anyone"
    choices: tuple[str, ...] = ()
    check: Callable[[str], None] | None = None
    convert: Callable[[str], Any] | None = None


MAX_TEXTS = 1024  # texts of an input decoded in parallel; memory and time of a step grow with them
MANY_TEXTS = 128  # from this number on, the user is warned
MAX_TOKENS = 2**20

Checkpoint = Annotated[
    str,
    Option(
        "A .ckpt file, a run's folder or name, last (the newest run), a Hugging Face folder, a GGUF file, hf:ORG/NAME.",
        ("-c", "--checkpoint"),
        metavar="CKPT",
        check=check_checkpoint,
    ),
]

Projector = Annotated[
    str | None,
    Option(
        "Image encoder of a GGUF file (mmproj-*.gguf of llama.cpp).",
        ("--mmproj",),
        metavar="FILE",
        check=check_projector,
    ),
]

Adapters = Annotated[
    str | None,
    Option(
        "Folder of LoRA adapters written by peft, for a Hugging Face folder.",
        metavar="DIR",
        check=check_adapters,
    ),
]

Device = Annotated[str, Option("auto, cpu, cuda or mps.", choices=("auto", "cpu", "cuda", "mps"))]
Precision = Annotated[
    str,
    Option(
        "auto, fp32, bf16 or int8 (8-bit weights, CPU only). auto: bf16 if the device computes it faster than fp32.",
        choices=("auto", "fp32", "bf16", "int8"),
    ),
]
BatchSize = Annotated[int, Option("Number of inputs in a batch.", least=1, scope="machine")]
Trust = Annotated[str | None, Option("Python package that a checkpoint may load classes from.")]
Out = Annotated[str | None, Option("Write to this file instead of stdout.", metavar="FILE")]
Form = Annotated[
    str,
    Option(
        "text, jsonl, csv; html for captions, parquet for those of shards and vectors, npy for vectors.",
        ("--format",),
        metavar="FORMAT",
    ),
]
Language = Annotated[str | None, Option("Language of the captions; by default the first of the model.")]
Question = Annotated[
    str | list[str],
    Option("Question about each input. Repeatable.", cli_type=list[str], input_kind="text", metavar="TEXT"),
]
Prompt = Annotated[
    str | list[str] | None,
    Option(
        "Instruction, or the entire prompt if it contains <image>. For models that read images in a prompt.",
        cli_type=list[str],
        metavar="TEXT",
    ),
]
Top = Annotated[int, Option("Number of classes for each input, most probable first.", least=1)]

Overrides = Annotated[
    list[str] | None, Option("Config values, as KEY=VALUE.", metavar="[OVERRIDES]...", positional=True)
]


@dataclass(kw_only=True)
class ModelOptions:
    """The checkpoint of a model, and its device and precision."""

    checkpoint: Checkpoint
    mmproj: Projector = None
    adapters: Adapters = None
    device: Device = "auto"
    precision: Precision = "auto"
    trust: Trust = None

    def __post_init__(self) -> None:
        # Resolved to the file, which no output may replace.
        checkpoint = os.fspath(find_best_checkpoint(self.checkpoint))
        self.checkpoint = join_places(checkpoint, mmproj=self.mmproj, adapters=self.adapters)
        self.mmproj = self.adapters = None

    def load(self, kind: Callable[..., Loaded], **options: Any) -> Loaded:
        """Loads the predictor of the checkpoint on the device and in the precision of the options."""
        from vlm.config.target import check_package

        if self.trust is not None:
            check_package(self.trust, "--trust ")
        with paused_collection():
            from vlm.nn.device import choose_device, choose_precision

            device = choose_device(self.device)
            dtype = choose_precision(self.precision, device)
            options |= {"device": device, "dtype": dtype, "int8": self.precision == "int8"}
            return kind(self.checkpoint, trust=self.trust, **options)


@dataclass(kw_only=True)
class OutputOptions:
    """The output file of a command, and its format."""

    form: Form = "text"
    out: Out = None


@dataclass(kw_only=True)
class Options:
    """Options of every command that runs a model; the base class of the tasks' options."""

    batch_size: BatchSize = 32

    def files(self) -> list[str]:
        """Returns the files that are read for the options; outputs may not replace them."""
        return []


@dataclass(kw_only=True)
class ImageOptions(Options):
    """Options of every command that runs a model on images."""

    workers: Annotated[
        int | None,
        Option("Threads that read images ahead. By default one per CPU, up to 8.", least=0, most=64, scope="machine"),
    ] = None


# Defaults of options that neither the user nor the checkpoint sets.
DEFAULTS: dict[str, int | float] = {
    "beam": 1,
    "length_penalty": 1.0,
    "min_tokens": 0,
    "no_repeat_ngram": 0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
}
SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p")
SEARCH_NAMES = ("early_stopping", "end_counts", "forced_end")  # what a checkpoint may state in addition to options


Temperature = Annotated[
    float | None, Option("Divides logits; below 1 it favours probable tokens. By default the checkpoint's, else 1.")
]
TopK = Annotated[int | None, Option("Sample from the k most probable tokens.")]
TopP = Annotated[float | None, Option("Sample from the most probable tokens with this total probability.")]


@dataclass(kw_only=True)
class SamplingOptions:
    """Options of generation token by token; None means the checkpoint's value, else the one in `DEFAULTS`."""

    max_tokens: Annotated[
        int | None,
        Option(
            "Maximum tokens per text. By default the checkpoint's, else 256 for generate and chat.",
            least=1,
            most=MAX_TOKENS,
        ),
    ] = None
    sample: Annotated[
        bool | None,
        Option("Sample tokens, or take the most probable; language models sample by default.", ("--sample/--greedy",)),
    ] = None
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: Annotated[
        float | None, Option("Sample from tokens with at least this fraction of the highest probability.")
    ] = None
    seed: Annotated[int, Option("Random seed of sampling. The same seed gives the same text.")] = 0

    def build_sampling(self) -> "Sampling":
        """Returns the sampling settings."""
        from vlm.decoding.sampling import Sampling

        return Sampling(**self._values_for(Sampling))

    def _values_for(self, kind: type) -> dict[str, Any]:
        """Returns the options that a dataclass has under the same names."""
        names = {field.name for field in fields(kind)}
        return {name: value for name, value in vars(self).items() if name in names}


@dataclass(kw_only=True)
class DecodingOptions(SamplingOptions):
    """Options of every command that generates text; `resolve` replaces None."""

    min_tokens: Annotated[int | None, Option("Minimum number of tokens per text.", least=0)] = None
    beam: Annotated[
        int | None,
        Option(
            "Number of beams; 1 is greedy search. By default the checkpoint's, else 1.",
            least=1,
            most=MAX_TEXTS,
        ),
    ] = None
    length_penalty: Annotated[float | None, Option("Score beams by log-probability / length ** PENALTY.")] = None
    groups: Annotated[int, Option("Groups of diverse beam search, which must divide --beam.", least=1)] = 1
    diversity: Annotated[float, Option("Penalty for a token that an earlier group chose.")] = 0.5
    results: Annotated[int, Option("Number of texts per input.", least=1, most=MAX_TEXTS)] = 1
    no_repeat_ngram: Annotated[int | None, Option("Never repeat a sequence of this many tokens.", least=0)] = None
    repetition_penalty: Annotated[float | None, Option("Above 1 makes repeated tokens less probable.")] = None
    ban: Annotated[list[str] | None, Option("A word that must not occur. Repeatable.", metavar="WORD")] = None
    require: Annotated[list[str] | None, Option("A word that must occur. Repeatable.", metavar="WORD")] = None

    def resolve(self, stored: "DecodingDefaults", *, samples_by_default: bool = False) -> Self:
        """Returns a copy with unset options taken from the checkpoint's defaults, else from DEFAULTS.

        Args:
            stored: The checkpoint's values by option name, such as those of a Hugging Face folder.
            samples_by_default: Whether to sample if neither the user nor the checkpoint decides.
        Raises:
            UserError: The user sets an option that the decoding mode does not use.
        """
        sampling_names = [name for name in SAMPLING_NAMES if getattr(self, name) is not None]
        has_length_penalty = self.length_penalty is not None
        uses_beams = (self.beam or 1) > 1
        # The checkpoint cannot override the decoding mode that the user chooses; grammars exclude beams.
        ignored = {"beam"} if self.sample is not None or has_grammar(self) else {"sample"} if uses_beams else set()
        resolved = copy(self)
        for name, value in [*stored.items(), *DEFAULTS.items()]:
            if name not in ignored and getattr(resolved, name, None) is None:
                setattr(resolved, name, value)
        if resolved.beam is None or (resolved.sample and not uses_beams):
            resolved.beam = 1
        is_sampled = samples_by_default and resolved.beam == 1 if resolved.sample is None else resolved.sample
        if sampling_names and not is_sampled:
            raise UserError(f"--{sampling_names[0].replace('_', '-')}: applies only to sampling; add --sample")
        if has_length_penalty and resolved.beam == 1:
            raise UserError("--length-penalty: applies only to beam search; add --beam N with N greater than 1")
        return resolved

    def build_rules(self, tokenizer: "Tokenizer", *, begin: Sequence[int] = ()) -> "Rules":
        """Returns the rules for texts, with words encoded.

        Args:
            begin: Tokens before the prefix.
        """
        from vlm.decoding.constraints import Rules

        return build_word_rules(
            tokenizer, begin=begin, ban=self.ban or (), require=self.require or (), **self._values_for(Rules)
        )

    def build_decoding(self, rules: "Rules", *, sample: bool) -> "Decoding":
        """Returns a search, or sampling, under these rules."""
        from vlm.decoding.options import Decoding

        return Decoding(rules=rules, sampling=self.build_sampling() if sample else None, **self._values_for(Decoding))


GRAMMAR_NAMES = ("json_schema", "regex", "choice")


def has_grammar(options: object) -> bool:
    """Returns True if options state what a text must match."""
    return any(getattr(options, name, None) is not None for name in GRAMMAR_NAMES)


def build_word_rules(
    tokenizer: "Tokenizer",
    *,
    prefix: str = "",
    begin: Sequence[int] = (),
    ban: Sequence[str] = (),
    require: Sequence[str] = (),
    **options: Any,
) -> "Rules":
    """Returns rules with a prefix, banned words and required words; other options as in Rules.

    A word is banned inside a text and at its beginning, with a lower-case and a capital first letter; so are longer
    words that begin with the same tokens. A required word is one inside a text. Both are sequences of tokens: a model
    that spells a word with other tokens than the tokenizer is not detected.

    Args:
        prefix: Beginning of the texts.
        begin: Tokens before it.
        ban, require: Words.
    Raises:
        UserError: A word is empty, or has no tokens.
    """
    from vlm.data.text.words import spaceless_pattern
    from vlm.decoding.constraints import Rules

    if not all(word.strip() for word in (*ban, *require)):
        raise UserError("--ban, --require: a word is empty; give a word, or remove the option")
    forms = {first + word[1:] for word in ban for first in (word[:1].lower(), word[:1].upper())}
    banned = {tuple(tokenizer.encode_written(space + form)) for form in forms for space in ("", " ")}
    inside = (word if spaceless_pattern().match(word) else f" {word}" for word in require)
    required = tuple((tuple(tokenizer.encode_written(form)),) for form in inside)
    first = (*begin, *(tokenizer.encode_written(prefix.rstrip()) if prefix else ()))
    return Rules(prefix=first, banned=tuple(sorted(banned)), required=required, **options)


@dataclass(kw_only=True)
class WritingOptions(DecodingOptions, Options):
    """Options of models that generate a text for each input."""

    prefix: Annotated[str, Option("Beginning of every output text.")] = ""
    trace: Annotated[str | None, Option("Write the trees of beam search as JSON.", metavar="FILE", scope="command")] = (
        None
    )


def check_stored_decoding(values: Mapping[str, int | float | str | Sequence[int]]) -> "DecodingDefaults":
    """Checks a checkpoint's decoding options and returns them, for `DecodingOptions.resolve`.

    Raises:
        ValueError: They are not decoding options.
    """
    stored = dict(values)
    names = {*DecodingOptions.__dataclass_fields__, *SEARCH_NAMES}
    listed = {name: tuple(cast(Sequence[int], stored.pop(name))) for name in ("ends", "never") if name in stored}
    if any(type(token) is not int or token < 0 for tokens in listed.values() for token in tokens):
        raise ValueError(f"not lists of token ids: {listed!r:.60}")
    invalid = [name for name, value in stored.items() if name not in names or type(value) not in (bool, int, float)]
    if invalid and (invalid != ["early_stopping"] or stored["early_stopping"] != "never"):
        raise ValueError(f"unsupported decoding option {invalid[0]!s:.40}={stored[invalid[0]]!r:.40}")
    return cast("DecodingDefaults", stored | listed)


@cache
def cached_type_hints(kind: type) -> dict[str, Any]:
    """Returns the type hints of a dataclass; cached, because resolving them takes longer than a small decode step."""
    return get_type_hints(kind, include_extras=True)


def get_options(kind: type) -> dict[str, Option]:
    """Returns the options of a dataclass by field name."""
    return {field.name: next(iter(cached_type_hints(kind)[field.name].__metadata__)) for field in fields(kind)}


def required_fields(kind: type) -> list[str]:
    """Returns the names of a dataclass's fields without default."""
    return [field.name for field in fields(kind) if field.default is MISSING]


def build_options(kind: type[OptionsType], values: Mapping[str, Any], *, use: str, client: bool = False) -> OptionsType:
    """Builds options from the values of a Python call or a client, and checks them.

    Args:
        kind: The task's options dataclass.
        values: The values by name.
        use: The name of the task's command, for messages.
        client: Whether they come from a client of a service, which may not set options of scope "machine".
    Raises:
        UserError: A name is unknown, a value has the wrong type or is out of range, or a required value is missing.
    """
    from vlm.config.types import describe_json_mismatch, describe_mismatch, fits

    closed_scopes = ("machine", "command") if client else ("command",)
    allowed = {name: option for name, option in get_options(kind).items() if option.scope not in closed_scopes}
    hints = cached_type_hints(kind)  # type: ignore[arg-type]  # a class is hashable
    for name, given in values.items():
        if name not in allowed:
            raise UserError(f"{name}: unknown to {use}{did_you_mean(find_similar(name, allowed))}")
        value, option = list(given) if isinstance(given, tuple) else given, allowed[name]
        hint: Any = Annotated[hints[name], Range(option.least, option.most)]
        if not fits(value, hint):
            raise UserError(f"{name}: {(describe_json_mismatch if client else describe_mismatch)(value, hint)}")
    if missing := [name for name in required_fields(kind) if name not in values]:
        raise UserError(f"{missing[0]}: missing; {use} needs it")
    return kind(**values)


def without_input_parts(options: OptionsType) -> OptionsType:
    """Returns options with input parts set to None; inputs whose remaining options are equal can share a batch."""
    input_parts = [name for name, option in get_options(type(options)).items() if option.input_kind]
    return replace(options, **dict.fromkeys(input_parts)) if input_parts else options  # type: ignore[arg-type]


def refuse_combination(use: str, options: Mapping[str, str | bool | None]) -> None:
    """Checks that options which a command cannot combine are unset.

    Raises:
        UserError: One of them is set.
    """
    for name in (name for name, value in options.items() if value):
        raise UserError(f"{name}: cannot be combined with {use}; remove one of them")


def as_list(value: Item | list[Item] | tuple[Item, ...]) -> list[Item]:
    """Converts one value or several to a list."""
    return list(value) if isinstance(value, list | tuple) else [value]
