"""The Python API: `vlm.load`, `vlm.train`, `vlm.score`. torch loads when one of them needs it, not before.

Errors that a user can correct are raised as `vlm.Error`, with the one or two lines that the commands print.
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, Field, fields
from functools import cache, cached_property
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm.errors import UserError
from vlm.errors import UserError as Error
from vlm.inference.command_options import AnswerOptions
from vlm.inference.options import ModelOptions, build_options, cached_type_hints, get_options
from vlm.inference.tasks import Command, command_names, commands_by_task, import_object
from vlm.machine import tune

if TYPE_CHECKING:
    from torch import nn

    from vlm.inference.attention.pictures import AttentionPicture
    from vlm.inference.predictor import Predictor
    from vlm.tasks.chat.session import Chat


__all__ = ["Error", "Model", "Run", "load", "score", "train"]

PathLike = str | os.PathLike[str]
INPUTS = "inputs"


class NoSuchUse(Error, AttributeError):
    """The model's task does not have this method."""


class Model:
    """A trained model of any task, ready to use.

    It has a method for each command of its task: `caption`, `classify`, `generate`, `translate`, `tag`, `answer`,
    `fill`, `retrieve`; a model with an encoder has `embed` too. One input gives one result, a list gives a list. A
    method takes the options of its command, which `help(model.caption)` shows.

    Args:
        path: As in `load`.
        options: As in `load`.
    """

    def __init__(self, path: PathLike, **options: Any) -> None:
        self._options = ModelOptions(checkpoint=os.fspath(path), **options)
        self._plain = self._used = False
        self._predictor: Predictor = self._load()

    def _load(self) -> Any:
        from vlm.inference.predictor import load_predictor

        return self._options.load(load_predictor)

    @property
    def task(self) -> str:
        """The task's name, such as captioning."""
        return self._predictor.task

    @property
    def module(self) -> "nn.Module":
        """The plain nn.Module. From then on the model uses it without packed weights, which is slower on a CPU."""
        if not self._plain:
            self._predictor, self._plain = self._load(), True
        return self._predictor.model

    def predict(self, *inputs: Any, **options: Any) -> Any:
        """The result of one input, or a list of results; the same as the method of the task's first command.

        Args:
            inputs: One input or a list; then its other parts, such as a question, if they are not given by name.
            options: The options of the command, as in `help(model.caption)`.
        """
        return self._predict(self._predictor, self._commands[0], inputs, options)

    def attention(self, image: Any, **options: Any) -> "AttentionPicture":
        """A picture of the attention of a captioner over the image, for each word; with `show` and `save`.

        Args:
            image: A path, a Pillow image, or an array (H, W, 3).
            options: Options of captioning.
        """
        draw = getattr(self._predictor, "attention", None)
        if draw is None:
            raise NoSuchUse(f"attention: not supported for a model for {self.task}; load a captioner")
        settings = build_options(self._predictor.options, options, use="attention")
        self._predictor.check_options(settings)
        return draw(image, settings)

    def chat(self, *images: Any, system: str | None = None, forget: bool = False, **options: Any) -> "Chat":
        """A conversation: `say` answers, `stream` yields the answer as it grows.

        Args:
            images: Paths, images of Pillow, or arrays (H, W, 3), attached to the first user message.
            system: System prompt.
            forget: Whether to drop the oldest user turn and its answer when the context window is full.
            options: Options of `vlm chat`.
        """
        if "chat" not in self._commands:
            raise NoSuchUse(f"chat: not supported for a model for {self.task}; use model.{self._commands[0]}")
        from vlm.tasks.chat.session import Chat

        kind = import_object(commands_by_task("chat")[self.task].predictor)
        predictor = kind.with_same_model(self._predictor)
        if not (self._plain or self._used):
            predictor.prepack(1)
            self._used = True
        chat = Chat(predictor, build_options(AnswerOptions, options, use="chat"), system=system, forget=forget)
        for image in images:
            chat.show(image)
        return chat

    def _predict(self, predictor: "Predictor", name: str, given: Sequence[Any], values: Mapping[str, Any]) -> Any:
        from vlm.inference.use import predict_answers

        arguments = bind_arguments(name, type(predictor), given, values)
        inputs = arguments.pop("inputs")
        options = build_options(predictor.options, arguments, use=name)
        predictor.check_options(options)
        several, is_single = predictor.arguments.from_python(inputs)
        results = predict_answers(predictor, several, options, prepack=None if self._plain else self._used)
        self._used = True
        return results[0] if is_single and len(results) == 1 else results

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._commands:
            raise NoSuchUse(f"{name}: not supported for a model for {self.task}; use model.{self._commands[0]}")
        command = commands_by_task(name)[self.task]
        kind = import_object(command.predictor)

        def method(*inputs: Any, **options: Any) -> Any:
            return self._predict(kind.with_same_model(self._predictor), name, inputs, options)

        method.__name__, method.__qualname__, method.__doc__ = name, f"Model.{name}", build_docstring(command, kind)
        method.__signature__ = build_signature(kind)  # type: ignore[attr-defined]
        return method

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._commands]

    def __repr__(self) -> str:
        return f"vlm.load({self._options.checkpoint!r})  # model.{self._commands[0]}"

    @cached_property
    def _commands(self) -> tuple[str, ...]:
        """The names of the task's commands; a user's task has `predict`."""
        return command_names(self.task)


class Run:
    """A finished training run.

    Attributes:
        folder: Its folder.
        best: Its best checkpoint, for `load`.
    """

    def __init__(self, folder: PathLike) -> None:
        from vlm.checkpoint.load import locate

        self.folder = Path(folder)
        self.best = locate(folder)

    def evaluate(
        self, split: str | None = None, *overrides: str, device: str = "auto", batch_size: int | None = None
    ) -> dict[str, float]:
        """The scores of the best checkpoint by name: "cider" is the model's, "cider@shuffled" that of a control.

        Args:
            split: train, val or test; by default test, or val where there is no test split.
            overrides: Config values, as KEY=VALUE.
            device: auto, cpu, cuda or mps.
            batch_size: Inputs at a time.
        """
        from vlm.training.run.evaluate import evaluate_checkpoint

        options: Any = {"split": split, "device": device, "batch_size": batch_size}
        with ExitStack() as stack:
            *_, results = evaluate_checkpoint(str(self.best), list(overrides), stack, **options)
        return {name.partition("/")[2]: value for name, value in results.items()}

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        return f"<run {self.folder}>"


def load(path: PathLike, *, device: str = "auto", precision: str = "auto", trust: str | None = None) -> Model:
    """Loads a trained model.

    Args:
        path: A checkpoint, a run's folder or name, `last` (the newest run), a Hugging Face folder, a GGUF file,
            `hf:ORG/NAME`.
        device: auto, cpu, cuda or mps.
        precision: auto, fp32, bf16 or int8 (8-bit weights, CPU only). auto: bf16 if the device computes it faster.
        trust: Python package that a checkpoint may load classes from.
    Raises:
        Error: The path holds no model, is damaged, or its model does not run on this machine.
    """
    tune()
    return Model(path, device=device, precision=precision, trust=trust)


def train(*overrides: str, **sections: Any) -> Run:
    """Trains a model like `vlm train`, in a new run folder, and tests the best checkpoint.

    Args:
        overrides: Config values as on the command line, such as "data=flickr8k" or "resume=last".
        sections: The same as Python values, such as trainer={"max_epochs": 3} or seed=1.
    Raises:
        Error: The config, the data or the machine is at fault.
        KeyboardInterrupt: A signal stopped the run; resume=last goes on.
    """
    tune()
    from vlm.training.run.fit import fit

    return Run(fit([*overrides, *_overrides(sections)]))


def score(results: Any, references: Any, *, java: bool = False, references_of: Any = None) -> dict[str, float]:
    """Scores captions as COCO's evaluation does: BLEU, ROUGE-L and CIDEr. It needs no model.

    Args:
        results: A file in COCO's result format or its content, or captions: a dictionary by image, or a list.
        references: A file in COCO's annotation format or its content, or the captions of each image, likewise.
        java: Also METEOR and SPICE; needs pycocoevalcap and Java.
        references_of: References of a larger set, likewise, for the weights of CIDEr. A single image has no "cider"
            without it.
    Raises:
        Error: A file cannot be read, or no image has both a result and references.
    """
    from vlm.evaluation import score as scores

    captioned, larger = scores.read_captions(results, references, references_of)
    return scores.score(captioned, java=java, larger=larger).corpus


def _overrides(sections: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """KEY=VALUE for each value of nested sections."""
    for name, value in sections.items():
        if isinstance(value, Mapping):
            yield from _overrides(value, f"{above}{name}.")
        else:
            text = str(value) if isinstance(value, str | os.PathLike) else json.dumps(value, ensure_ascii=False)
            yield f"{above}{name}={text}"


def bind_arguments(
    name: str, kind: type["Predictor"], given: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a method by name; input parts, such as a question, may be given by position.

    Args:
        name: The name of the method, for messages.
        kind: Its predictor.
        given: Arguments by position.
        options: Arguments by name.
    Raises:
        UserError: The inputs are missing, there are too many arguments, or an argument is given twice.
    """
    names = [INPUTS, *_input_parts(kind)]
    if len(given) > len(names):
        takes = " and ".join(names)
        raise UserError(f"{name}: takes {takes} by position, got {len(given)} values; give a list, or options by name")
    bound = dict(zip(names, given, strict=False))
    if repeated := next((parameter for parameter in bound if parameter in options), None):
        raise UserError(f"{repeated}: given both by position and by name; give it once")
    bound |= options
    if INPUTS not in bound:
        raise UserError(f"{INPUTS}: missing; {name} needs one {kind.arguments.kind}, or a list")
    return bound


def _input_parts(kind: type["Predictor"]) -> list[str]:
    """Returns the names of the options that are input parts, required ones first."""
    declared_options = get_options(kind.options)
    parts = [option for option in fields(kind.options) if declared_options[option.name].input_kind]
    return [option.name for option in sorted(parts, key=lambda option: option.default is not MISSING)]


@cache
def build_signature(kind: type["Predictor"]) -> Signature:
    """Returns the signature of a predictor's method."""
    hints, parts = cached_type_hints(kind.options), _input_parts(kind)
    parameters = [Parameter(INPUTS, Parameter.POSITIONAL_OR_KEYWORD)]
    for option in _python_options(kind):
        place = Parameter.POSITIONAL_OR_KEYWORD if option.name in parts else Parameter.KEYWORD_ONLY
        default = Parameter.empty if option.default is MISSING else option.default
        parameters.append(Parameter(option.name, place, default=default, annotation=hints[option.name].__origin__))
    return Signature(parameters)


@cache
def build_docstring(command: Command, kind: type["Predictor"]) -> str:
    """Returns the docstring of a command's method."""
    declared_options = get_options(kind.options)
    summary = re.split(r"[:.](?:\s|$)", command.help)[0]  # without the part about the command line
    lines = [f"{summary}.", "", "Args:"]
    lines.append(f"    {INPUTS}: One {kind.arguments.kind}, which gives one result, or a list, which gives a list.")
    for option in _python_options(kind):
        default = "" if option.default in (MISSING, None) else f" [default: {option.default!r}]"
        lines.append(f"    {option.name}: {declared_options[option.name].help}{default}")
    lines += ["", "Returns:", f"    {describe_return(kind)}"]
    if kind.result is not None:  # with the fields of a result, as its docstring describes them
        lines += [f"    {line}" for line in (inspect.getdoc(kind.result) or "").partition("Args:\n")[2].splitlines()]
    return "\n".join(lines)


def describe_return(kind: type["Predictor"]) -> str:
    """Returns the sentence on what a method returns."""
    return kind.returns if kind.returns.endswith(".") else f"{kind.returns}; of several inputs, a list."


def _python_options(kind: type["Predictor"]) -> list[Field]:
    """Returns the options of the Python API, input parts first."""
    declared_options, parts = get_options(kind.options), _input_parts(kind)
    offered = [option for option in fields(kind.options) if declared_options[option.name].scope != "command"]
    return sorted(offered, key=lambda option: parts.index(option.name) if option.name in parts else len(parts))
