"""Options of the commands, each declared once. torch is imported only when a command runs."""

import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_type_hints

from vlm.checkpoint.locate import PREFIX as HUB
from vlm.checkpoint.locate import in_run, no_checkpoint
from vlm.errors import Range, UserError, did_you_mean, excerpt, nearest

if TYPE_CHECKING:
    from vlm.decoding.constraints import Rules
    from vlm.decoding.options import Decoding
    from vlm.decoding.sampling import Sampling

Loaded = TypeVar("Loaded")
OptionsType = TypeVar("OptionsType", bound="Options | SamplingOptions")
Kind = Literal["text", "image"]


@dataclass(frozen=True)
class Option:
    """An option in the annotation of a dataclass's field, which adds its type and default.

    Args:
        help: Its line in --help.
        flags: Its names, such as "-c"; by default the field's.
        least, most: Its range.
        metavar: The name of its value in --help.
        positional: Whether it is an argument without a name on the command line.
        typed: Its type on the command line, if that differs from the annotation.
        beside: Its kind, if it is a part of the input (a question, a second text, a photo) and not a setting.
        scope: Who may set it: "anyone"; "machine": a command or Python, but no client of a service; "command": only the
            command line.
        choices: The values that a command line may give; all by default.
        check: Called with its value on a command line before the command runs, which may take seconds to begin.
    """

    help: str
    flags: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    metavar: str | None = None
    positional: bool = False
    typed: Any = None
    beside: Kind | None = None
    scope: Literal["anyone", "machine", "command"] = "anyone"
    choices: tuple[str, ...] = ()
    check: Callable[[str], None] | None = None


MOST_TEXTS = 1024  # texts of an input decoded in parallel; memory and time of a step grow with them
MANY_TEXTS = 128  # from this number on, the user is warned
MOST_TOKENS = 2**20


def check_checkpoint(place: str) -> None:
    """Checks that a checkpoint of this machine exists; those of the Hub are not looked up.

    Raises:
        UserError: There is none.
    """
    if not place.startswith(HUB) and not (path := in_run(place)).exists():
        raise no_checkpoint(path)


Checkpoint = Annotated[
    str,
    Option(
        "A .ckpt file, a run's folder or name, last (the newest run), a Hugging Face folder, a GGUF file, hf:ORG/NAME.",
        ("-c", "--checkpoint"),
        metavar="CKPT",
        check=check_checkpoint,
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
    Option("Question about each input. Repeatable.", typed=list[str], beside="text", metavar="TEXT"),
]
Prompt = Annotated[
    str | list[str] | None,
    Option(
        "Another instruction, or the whole prompt if it contains <image>; for models that read images in a prompt.",
        typed=list[str],
        metavar="TEXT",
    ),
]
Top = Annotated[int, Option("Number of classes for each input, most probable first.", least=1)]


Overrides = Annotated[
    list[str] | None, Option("Config values, as KEY=VALUE.", metavar="[OVERRIDES]...", positional=True)
]


@dataclass(kw_only=True)
class ModelOptions:
    """Which model is used, and where."""

    checkpoint: Checkpoint
    device: Device = "auto"
    precision: Precision = "auto"
    trust: Trust = None

    def __post_init__(self) -> None:
        self.checkpoint = os.fspath(in_run(self.checkpoint))  # resolved to the file, which no output may replace

    def load(self, kind: Callable[..., Loaded], **options: Any) -> Loaded:
        """Loads the predictor of the checkpoint on the device and in the precision of the options."""
        from vlm.config.target import check_package
        from vlm.inference.device import choose_device, choose_precision

        if self.trust is not None:
            check_package(self.trust, "--trust ")
        device = choose_device(self.device)
        dtype = choose_precision(self.precision, device)
        options |= {"device": device, "dtype": dtype, "int8": self.precision == "int8"}
        return kind(self.checkpoint, trust=self.trust, **options)


@dataclass(kw_only=True)
class OutputOptions:
    """Where a command writes its records, and how."""

    form: Form = "text"
    out: Out = None


@dataclass(kw_only=True)
class Options:
    """Options of every use of a model; the base of each task's own."""

    batch_size: BatchSize = 32

    def files(self) -> list[str]:
        """Returns the files that are read for the options; outputs may not replace them."""
        return []


@dataclass(kw_only=True)
class ImageOptions(Options):
    """Options of every use of a model that reads images."""

    workers: Annotated[
        int | None,
        Option("Threads that read images ahead. By default one per CPU, up to 8.", least=0, most=64, scope="machine"),
    ] = None


# Values of options that neither the user nor the checkpoint sets.
PLAIN: dict[str, Any] = {
    "beam": 1,
    "length_penalty": 1.0,
    "min_tokens": 0,
    "no_repeat_ngram": 0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
}
OF_DRAWS = ("temperature", "top_k", "top_p", "min_p")
OF_SEARCH = ("early_stopping", "end_counts", "forced_end")  # what a checkpoint may state in addition to options


@dataclass(kw_only=True)
class SamplingOptions:
    """Options of texts that are written token by token; None for those that a checkpoint or `PLAIN` says."""

    max_tokens: Annotated[
        int | None,
        Option(
            "Maximum number of tokens per text. By default the model's, or 256 for generate and chat.",
            least=1,
            most=MOST_TOKENS,
        ),
    ] = None
    sample: Annotated[
        bool | None,
        Option("Sample tokens, or take the most probable; language models sample by default.", ("--sample/--greedy",)),
    ] = None
    temperature: Annotated[float | None, Option("Divides the logits; below 1 it favours probable tokens.")] = None
    top_k: Annotated[int | None, Option("Sample from the k most probable tokens.")] = None
    top_p: Annotated[float | None, Option("Sample from the likeliest tokens with this total probability.")] = None
    min_p: Annotated[float | None, Option("Sample from tokens with this share of the highest probability.")] = None
    seed: Annotated[int, Option("Random seed of sampling. The same seed gives the same text.")] = 0

    def sampling(self) -> "Sampling":
        """Returns the settings of sampling."""
        from vlm.decoding.sampling import Sampling

        return Sampling(**self._shared(Sampling))

    def _shared(self, kind: type) -> dict[str, Any]:
        """Returns the options that a dataclass has under the same names."""
        names = {field.name for field in fields(kind)}
        return {name: value for name, value in vars(self).items() if name in names}


@dataclass(kw_only=True)
class DecodingOptions(SamplingOptions):
    """Options of every command that writes text; None for those that `resolve` fills in."""

    min_tokens: Annotated[int | None, Option("Minimum number of tokens per text.", least=0)] = None
    beam: Annotated[
        int | None,
        Option(
            "Beams of the search; 1 is greedy. By default the checkpoint's, else 1.",
            least=1,
            most=MOST_TEXTS,
        ),
    ] = None
    length_penalty: Annotated[float | None, Option("Beams are ranked by log-probability / length ** PENALTY.")] = None
    groups: Annotated[int, Option("Groups of diverse beam search, which must divide --beam.", least=1)] = 1
    diversity: Annotated[float, Option("Penalty for a token that an earlier group chose.")] = 0.5
    results: Annotated[int, Option("Texts for each input.", least=1, most=MOST_TEXTS)] = 1
    no_repeat_ngram: Annotated[int | None, Option("No sequence of this many tokens occurs twice.", least=0)] = None
    repetition_penalty: Annotated[float | None, Option("Above 1 makes repeated tokens less probable.")] = None
    ban: Annotated[list[str] | None, Option("A word that must not occur. Repeatable.", metavar="WORD")] = None
    require: Annotated[list[str] | None, Option("A word that must occur. Repeatable.", metavar="WORD")] = None

    def resolve(self, stored: Mapping[str, Any], *, draws: bool = False) -> Self:
        """Returns a copy in which unset options are filled in from the checkpoint's defaults, else from PLAIN.

        Args:
            stored: The checkpoint's values by option name, such as those of a Hugging Face folder.
            draws: Whether tokens are drawn if neither the user nor the checkpoint decides.
        Raises:
            UserError: The user sets an option that this way of decoding does not use.
        """
        drawing = [name for name in OF_DRAWS if getattr(self, name) is not None]
        penalised = self.length_penalty is not None
        searched = (self.beam or 1) > 1
        # If the user asks for one way of decoding, the checkpoint cannot choose another.
        out = {"beam"} if self.sample is not None else {"sample"} if searched else set()
        it = copy(self)
        for name, value in [*stored.items(), *PLAIN.items()]:
            if name not in out and getattr(it, name, None) is None:
                setattr(it, name, value)
        if it.beam is None or (it.sample and not searched):
            it.beam = 1
        drawn = draws and it.beam == 1 if it.sample is None else it.sample
        if drawing and not drawn:
            raise UserError(f"--{drawing[0].replace('_', '-')}: applies to sampling alone; add --sample")
        if penalised and it.beam == 1:
            raise UserError("--length-penalty: ranks the texts of a beam search; add --beam N, more than 1")
        return it

    def rules(self, tokenizer: Any, *, begin: Sequence[int] = ()) -> "Rules":
        """Returns the rules for texts, with words encoded.

        Args:
            begin: Tokens before the prefix.
        """
        from vlm.decoding.constraints import Rules
        from vlm.inference.text.words import rules_of_words

        words: Any = {"ban": self.ban or (), "require": self.require or ()}
        return rules_of_words(tokenizer, begin=begin, **words, **self._shared(Rules))

    def search(self, rules: "Rules", *, sample: bool) -> "Decoding":
        """Returns a search, or sampling, under these rules."""
        from vlm.decoding.options import Decoding

        return Decoding(rules=rules, sampling=self.sampling() if sample else None, **self._shared(Decoding))


@dataclass(kw_only=True)
class WritingOptions(DecodingOptions, Options):
    """Options of a model that writes texts of its inputs."""

    prefix: Annotated[str, Option("Beginning of every output text.")] = ""
    trace: Annotated[str | None, Option("Write the trees of beam search as JSON.", metavar="FILE", scope="command")] = (
        None
    )


def stored_options(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's decoding options, for `DecodingOptions.resolve`.

    Raises:
        ValueError: They are not decoding options.
    """
    stored = dict(about.get("decoding", {}))
    known = {*DecodingOptions.__dataclass_fields__, *OF_SEARCH}
    listed = {name: tuple(stored.pop(name)) for name in ("ends", "never") if name in stored}
    if any(type(token) is not int or token < 0 for tokens in listed.values() for token in tokens):
        raise ValueError(f"no tokens are {listed!r:.60}")
    wrong = [name for name, value in stored.items() if name not in known or type(value) not in (bool, int, float)]
    if wrong and (wrong != ["early_stopping"] or stored["early_stopping"] != "never"):
        raise ValueError(f"no option of decoding is {wrong[0]!s:.40}={stored[wrong[0]]!r:.40}")
    return stored | listed


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """The type hints of a dataclass; kept, because resolving them takes longer than a small decode step."""
    return get_type_hints(kind, include_extras=True)


def declared(kind: type) -> dict[str, Option]:
    """The options that a dataclass declares, by the names of its fields."""
    return {field.name: next(iter(hints_of(kind)[field.name].__metadata__)) for field in fields(kind)}


def needed(kind: type) -> list[str]:
    """The fields of a dataclass that have no default."""
    return [field.name for field in fields(kind) if field.default is MISSING]


def checked(kind: type[OptionsType], values: Mapping[str, Any], *, use: str, client: bool = False) -> OptionsType:
    """Builds options from the values of a Python call or a client, and checks them.

    Args:
        kind: The task's options dataclass.
        values: The values by name.
        use: The name of the task's command, for messages.
        client: Whether they come from a client of a service, which may not set options of scope "machine".
    Raises:
        UserError: A name is unknown, a value has another type or is out of range, or a required one is missing.
    """
    from vlm.config.types import describe_json_mismatch, describe_mismatch, fits

    closed = ("machine", "command") if client else ("command",)
    known = {name: one for name, one in declared(kind).items() if one.scope not in closed}
    hints = hints_of(kind)  # type: ignore[arg-type]  # a class is hashable
    for name, given in values.items():
        if name not in known:
            raise UserError(f"{name}: unknown to {use}{did_you_mean(nearest(name, known))}")
        value, option = list(given) if isinstance(given, tuple) else given, known[name]
        hint: Any = Annotated[hints[name], Range(option.least, option.most)]
        if not fits(value, hint):
            raise UserError(f"{name}: {(describe_json_mismatch if client else describe_mismatch)(value, hint)}")
    if missing := [name for name in needed(kind) if name not in values]:
        raise UserError(f"{missing[0]}: missing; {use} needs it")
    return kind(**values)


def settings(options: OptionsType) -> OptionsType:
    """Returns options without the parts of an input; inputs with equal settings may share a batch."""
    beside = [name for name, option in declared(type(options)).items() if option.beside]
    return replace(options, **dict.fromkeys(beside)) if beside else options  # type: ignore[arg-type]


def refuse(use: str, options: Mapping[str, Any]) -> None:
    """Checks that options which a command cannot combine are unset.

    Raises:
        UserError: One of them is set.
    """
    for name in (name for name, value in options.items() if value):
        raise UserError(f"{name}: does not go with {use}; leave one of them out")


def as_list(value: Any) -> list[Any]:
    """Converts one value or several to a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def questions_of(question: str | Sequence[str]) -> list[str]:
    """Returns the questions of an option as a list.

    Raises:
        UserError: There is none, or one is empty or not UTF-8.
    """
    questions = as_list(question)
    if not questions or not all(map(str.strip, questions)):
        raise UserError(f"--question: {'is empty' if questions else 'missing'}; give a question, or several")
    refuse_undecoded(questions)
    return questions


def prompt_of(prompt: str | Sequence[str] | None) -> str | None:
    """Returns the prompt of an option, if there is one.

    Raises:
        UserError: There are several.
    """
    prompts = [] if prompt is None else as_list(prompt)
    if len(prompts) > 1:
        raise UserError("--prompt: given more than once; this model takes one")
    refuse_undecoded(prompts)
    return next(iter(prompts), None)


def refuse_undecoded(texts: Sequence[str]) -> None:
    """Checks that texts are valid UTF-8.

    Raises:
        UserError: One is not.
    """
    for text in texts:
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise UserError(f"text {excerpt(text)}: is not UTF-8; give text in UTF-8")
