"""Options of the commands that use a model, each declared once. Nothing of torch is imported before a command runs."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from vlm.checkpoint.runs import in_run
from vlm.errors import UserError, excerpt

if TYPE_CHECKING:
    from vlm.decoding.constraints import Rules
    from vlm.decoding.options import Decoding
    from vlm.decoding.sampling import Sampling

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Option:
    """An option of a command, apart from its type and default.

    Args:
        help: Its line in --help.
        flags: Its names, such as "-c"; by default the parameter's.
        least, most: Its range.
        metavar: The name of its value in --help.
        positional: Whether it has no name and stands where it stands.
    """

    help: str
    flags: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    metavar: str | None = None
    positional: bool = False


MOST_TEXTS = 1024  # of an input that are decoded side by side: memory and time of a step grow with them
MANY_TEXTS = 128  # of which the user is warned
MOST_TOKENS = 2**20

Checkpoint = Annotated[
    str,
    Option(
        "A .ckpt file, a run's folder, last (the newest run), a Hugging Face folder, or hf:ORG/NAME.",
        ("-c", "--checkpoint"),
        metavar="CKPT",
    ),
]
Device = Annotated[str, Option("auto, cpu, cuda or mps.")]
Precision = Annotated[str, Option("auto, fp32 or bf16; auto is bf16 where the device is faster in it.")]
BatchSize = Annotated[int, Option("Inputs at a time.", least=1)]
Trust = Annotated[str | None, Option("Package of your own whose classes may be loaded.")]
Out = Annotated[str | None, Option("Write to this file instead of stdout.", metavar="FILE")]
Images = Annotated[list[str], Option("Image files, folders or patterns.", positional=True)]
Files = Annotated[list[str], Option("Images, or text files where the model reads texts.", positional=True)]
Texts = Annotated[list[str] | None, Option("A text; may be repeated. Without one, lines of stdin.")]
Prefix = Annotated[str, Option("Beginning of every text.")]
Language = Annotated[str | None, Option("Language of the captions, of a model of several; by default its first.")]
TraceFile = Annotated[str | None, Option("Write the trees of beam search as JSON.", metavar="FILE")]
Workers = Annotated[
    int | None, Option("Threads that read images ahead; by default one a CPU, up to 8.", least=0, most=64)
]


@dataclass(kw_only=True)
class ModelOptions:
    """Options of every command that uses a model."""

    checkpoint: Checkpoint
    device: Device = "auto"
    precision: Precision = "auto"
    batch_size: BatchSize = 32
    form: Annotated[str, Option("text, jsonl, csv; html for captions, parquet for those of shards.", ("--format",))] = (
        "text"
    )
    out: Out = None
    trust: Trust = None

    def __post_init__(self) -> None:
        self.checkpoint = os.fspath(in_run(self.checkpoint))  # the file, which no output may replace

    def load(self, kind: Callable[..., Loaded]) -> Loaded:
        """The predictor of the checkpoint, on the device and in the precision of the options."""
        from vlm.inference.predictor import choose_device, choose_precision

        device = choose_device(self.device)
        return kind(self.checkpoint, device=device, dtype=choose_precision(self.precision, device), trust=self.trust)


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
OF_SEARCH = ("early_stopping", "end_counts")  # what a checkpoint may say beside options


@dataclass(kw_only=True)
class DecodingOptions:
    """Options of every command that writes text; None for those that `resolve` fills in."""

    max_tokens: Annotated[int | None, Option("Longest text, in tokens.", least=1, most=MOST_TOKENS)] = None
    min_tokens: Annotated[int | None, Option("Shortest text, in tokens.", least=0)] = None
    beam: Annotated[
        int | None,
        Option(
            "Hypotheses kept; 1 takes the likeliest token. By default the checkpoint's, else 1.",
            least=1,
            most=MOST_TEXTS,
        ),
    ] = None
    length_penalty: Annotated[float | None, Option("Beams rank by log-probability / length to this power.")] = None
    groups: Annotated[int, Option("Groups of beams that avoid each other's tokens.", least=1)] = 1
    diversity: Annotated[float, Option("Cost of a token that an earlier group took.")] = 0.5
    results: Annotated[int, Option("Texts an input.", least=1, most=MOST_TEXTS)] = 1
    sample: Annotated[
        bool | None,
        Option(
            "Draw tokens, or take the most probable: for prompts tokens are drawn by default.", ("--sample/--greedy",)
        ),
    ] = None
    temperature: Annotated[float | None, Option("Below 1 keeps to the probable tokens.")] = None
    top_k: Annotated[int | None, Option("Draw among the k most probable tokens.")] = None
    top_p: Annotated[float | None, Option("Draw among those that together have this probability.")] = None
    min_p: Annotated[float | None, Option("Draw among those this probable beside the likeliest.")] = None
    no_repeat_ngram: Annotated[int | None, Option("No run of this many tokens comes twice.", least=0)] = None
    repetition_penalty: Annotated[float | None, Option("Above 1 shuns tokens that came before.")] = None
    ban: Annotated[list[str] | None, Option("A word that no text has; may be repeated.", metavar="WORD")] = None
    require: Annotated[list[str] | None, Option("A word that each text has; may be repeated.", metavar="WORD")] = None
    seed: Annotated[int, Option("Seed of all draws; the same one gives the same text.")] = 0

    def resolve(self, stored: Mapping[str, Any], *, draws: bool = False) -> Self:
        """Fills in what the user leaves open: the checkpoint's own defaults, else plain ones.

        Args:
            stored: Values by the names of the options, which a folder of Hugging Face comes with.
            draws: Whether tokens are drawn where neither says so.
        Raises:
            UserError: The user sets an option that has no part in this way of writing.
        """
        drawing = [name for name in OF_DRAWS if getattr(self, name) is not None]
        penalised = self.length_penalty is not None
        searched = (self.beam or 1) > 1
        # A way of writing that is asked for excludes the others.
        out = {"beam"} if self.sample is not None else {"sample"} if searched else set()
        for name, value in [*stored.items(), *PLAIN.items()]:
            if name not in out and getattr(self, name, None) is None:
                setattr(self, name, value)
        if self.beam is None or (self.sample and not searched):
            self.beam = 1
        drawn = draws and self.beam == 1 if self.sample is None else self.sample
        if drawing and not drawn:
            raise UserError(f"--{drawing[0].replace('_', '-')}: is of tokens that are drawn; add --sample")
        if penalised and self.beam == 1:
            raise UserError("--length-penalty: ranks the texts of a beam search; add --beam N, more than 1")
        return self

    def rules(self, tokenizer: Any, **begin: Any) -> "Rules":
        """Rules of the texts, their words encoded.

        Args:
            begin: Prefix, and tokens before it, as in `rules_of_words`.
        """
        from vlm.decoding.constraints import Rules
        from vlm.inference.text.words import rules_of_words

        words: Any = {"ban": self.ban or (), "require": self.require or ()}
        return rules_of_words(tokenizer, **begin, **words, **self._shared(Rules))

    def sampling(self) -> "Sampling":
        """The tokens among which draws are made."""
        from vlm.decoding.sampling import Sampling

        return Sampling(**self._shared(Sampling))

    def search(self, rules: "Rules", *, sample: bool) -> "Decoding":
        """A search under these rules, or draws; one that takes long is noted on stderr."""
        from vlm.decoding.options import Decoding

        search = Decoding(rules=rules, sampling=self.sampling() if sample else None, **self._shared(Decoding))
        if search.columns >= MANY_TEXTS:
            line = f"note: {search.columns:,} texts of each input are decoded side by side; an input takes as long as"
            print(line, "so many by greedy search, or longer", file=sys.stderr)
        return search

    def _shared(self, kind: type) -> dict[str, Any]:
        """The options that a dataclass has under the same names."""
        names = {field.name for field in fields(kind)}
        return {name: value for name, value in vars(self).items() if name in names}


def stored_options(about: Mapping[str, Any]) -> dict[str, Any]:
    """The options of decoding that a checkpoint comes with, as `DecodingOptions.resolve` takes them.

    Raises:
        ValueError: They are none.
    """
    stored = dict(about.get("decoding", {}))
    known = {*DecodingOptions.__dataclass_fields__, *OF_SEARCH}
    wrong = [name for name, value in stored.items() if name not in known or type(value) not in (bool, int, float)]
    if wrong and (wrong != ["early_stopping"] or stored["early_stopping"] != "never"):
        raise ValueError(f"no option of decoding is {wrong[0]!s:.40}={stored[wrong[0]]!r:.40}")
    return stored


def refuse(use: str, options: Mapping[str, Any]) -> None:
    """Refuses options that a use of a command has no part for.

    Raises:
        UserError: One of them is set.
    """
    for name in (name for name, value in options.items() if value):
        raise UserError(f"{name}: does not go with {use}; leave one of them out")


def choose_workers(count: int | None) -> int:
    """Threads that read images, of --workers."""
    from vlm.inference.inputs import default_workers

    return default_workers() if count is None else count


def questions_of(question: str | Sequence[str], *, option: str = "question") -> list[str]:
    """The questions of an option: one, or several.

    Raises:
        UserError: There is none, or one is empty or no UTF-8.
    """
    questions = [question] if isinstance(question, str) else list(question)
    if not questions or not all(map(str.strip, questions)):
        what = "is empty" if questions else "missing"
        raise UserError(f"{option}: {what}; give a question, or several")
    refuse_undecoded(questions)
    return questions


def refuse_undecoded(prompts: Sequence[str]) -> None:
    """Refuses prompts that are no UTF-8, which no tokenizer can read.

    Raises:
        UserError: One is none.
    """
    for prompt in prompts:
        if any("\udc80" <= char <= "\udcff" for char in prompt):
            raise UserError(f"prompt {excerpt(prompt)}: is not UTF-8; give text in UTF-8")
