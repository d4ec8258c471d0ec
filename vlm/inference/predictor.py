"""Trained models, ready to use: the base of all tasks' predictors, of images and of texts."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, takewhile
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, cast

import torch
from PIL import Image
from torch import Tensor, nn

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.rebuild import convert_errors
from vlm.checkpoint.stored import Checkpoint, Metadata
from vlm.config.target import suggest_trust
from vlm.data.batch import InputRows
from vlm.data.images.image import Preprocess
from vlm.data.text.inputs import EncodedSample, Input, input_rows
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import Tokenizer, tokenizer_from_state
from vlm.errors import UserError
from vlm.inference.arguments import Arguments, ImageArguments, WordArguments
from vlm.inference.info import format_values
from vlm.inference.inputs import open_image
from vlm.inference.options import ImageOptions, Options
from vlm.inference.tasks import TASKS, current_task_name, import_object, object_path, wrong_task_error
from vlm.io.output import Output, Record, Records
from vlm.models.decoder import TextDecoder
from vlm.models.pretrained.load import is_published
from vlm.nn.step.packed import prepack, quantize

Source = TypeVar("Source")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")
TaskOptions = TypeVar("TaskOptions")
Rows = Sequence[Record]  # records of a result
Stored = Mapping[str, Callable[[Any], Any]]  # conversions of stored values by attribute
# Takes the place of an input and the tokens of its texts so far; returns False to stop that input.
Watch = Callable[[int, Sequence[Sequence[int]]], bool]


def offset_watch(watch: Watch | None, first: int) -> Watch | None:
    """Returns a watch for a later batch, whose first input is number `first`; None without a watch."""
    return None if watch is None else lambda place, texts: watch(first + place, texts)


class TerminalWriter(Protocol):
    """Writes texts to the terminal in the order of their inputs, the current one as it grows."""

    def watch(self, place: int, texts: Sequence[Sequence[int]]) -> bool: ...

    def finish(self, texts: Any) -> None: ...


class Predictor(ABC, Generic[Source, Prepared, Result, TaskOptions]):
    """A trained model of one task, with its preprocessing and output.

    Its types are those of `sources`, of `prepare`, of `results` and of the options.

    Attributes:
        task: The task's name in checkpoints: a short name for tasks of vlm, package.module.Class for a user's.
        fields: The fields of a record that a line of text shows.
        options: The dataclass of its options.
        arguments: The class of its inputs.
        result: The class of a result in Python; None if its fields need no list.
        returns: What Python gets for one input.
        stored: Attributes that checkpoints of the class store besides the model, each with the conversion of its value.
            A subclass states only its additional ones; one with a default in the class is optional.
        model_task: The checkpoint's task, a key of TASKS or package.module.Class; a predictor that several tasks share,
            such as that of chat, has another `task`.
        trained_task: The task that was trained, by its name in conf/task, such as conversations, whose models `task`
            calls image_questions; `task` if the checkpoint is of no run.
        run_name: The name of the run that trained the model, if any.
    Args:
        path: The checkpoint.
        device: The device that it runs on.
        dtype: Type of weights and states.
        int8: Whether linear layers are stored in 8 bits, on a CPU with dtype float32.
        trust: A user's package whose classes may be built.
        loaded: The content of the checkpoint, if it has been read before.
    Raises:
        UserError: The checkpoint is damaged or of another task, or int8 is asked for and no layer supports it.
    """

    task: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    options: ClassVar[Any] = Options
    arguments: ClassVar[type[Arguments]] = WordArguments
    result: ClassVar[type | None] = None
    returns: ClassVar[str] = "The result of the model"
    stored: ClassVar[Stored] = {}

    def __init__(
        self,
        path: str,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        int8: bool = False,
        trust: str | None = None,
        loaded: Checkpoint | None = None,
    ) -> None:
        loaded = ckpt.read(path, dtype=torch.qint8 if int8 else dtype) if loaded is None else loaded
        self.device, self.dtype = device, dtype
        with convert_errors(path):
            about = loaded["vlm"]
            held = current_task_name(about["task"])
            predictors = [command.predictor for command in TASKS[held].commands] if held in TASKS else []
            if held != self.task and object_path(type(self)) not in predictors:
                raise wrong_task_error(path, held, self.task)
            config = about.get("config") or {}
            names = {name: config[name] for name in ("task_name", "name") if isinstance(config.get(name), str)}
            self.model_task = held
            self.trained_task, self.run_name = names.get("task_name") or held, names.get("name")
            self.restore(about)
            self.model: Any = ckpt.load_model(loaded, trust=trust, dtype=dtype).to(device)
            if not is_published(ckpt.locate(path)):  # published ones were checked when read
                with torch.inference_mode():
                    self.check()
        del loaded  # so that layers which are replaced are freed
        if int8 and not quantize(
            self.model, [module for module in self.model.modules() if isinstance(module, TextDecoder)]
        ):
            raise UserError(f"{path}: --precision int8: the model has no layers that support it; choose auto")

    def restore(self, about: Metadata) -> None:
        """Sets the attributes in `stored` from what a checkpoint holds besides the model, the task's `description`.

        An attribute with a default in the class may be missing in the checkpoint.
        """
        values: Mapping[str, object] = about
        for base in reversed(type(self).__mro__):
            for name, convert in vars(base).get("stored", {}).items():
                if name in values or not hasattr(type(self), name):
                    setattr(self, name, convert(values[name]))

    def check(self) -> None:
        """Checks that the model's outputs fit the rest of the checkpoint.

        Raises:
            UserError: They do not.
        """
        return None

    def check_options(self, options: TaskOptions) -> None:
        """Checks that options suit this model.

        Raises:
            UserError: One does not.
        """
        return None

    def sources(self, inputs: Sequence[Any], options: TaskOptions) -> list[Source]:
        """Joins each input with its other parts, such as a question; by default, inputs have none.

        Raises:
            UserError: A part is missing, or the numbers of parts and inputs differ.
        """
        return list(inputs)

    def prepare(self, source: Source, options: TaskOptions) -> Prepared:
        """Prepares a source for the model; by default, the model reads the source itself.

        Raises:
            UserError: It cannot be read or used.
        """
        return cast(Prepared, source)

    @abstractmethod
    def results(
        self, batches: Iterable[Sequence[Prepared] | None], options: TaskOptions, *, watch: Watch | None = None
    ) -> Iterator[tuple[int, Result]]:
        """Yields the place of an input and its result, as soon as it is ready.

        Args:
            batches: Prepared sources, taken when the model has room for more; None if none waits now.
            watch: Called with the texts of each input as they grow, by models that write token by token.
        """

    def answer(self, result: Result, options: TaskOptions) -> Any:
        """Converts a result for Python and clients: one text instead of a list of one."""
        return result

    @abstractmethod
    def record(self, source: Source, result: Result, options: TaskOptions, *, form: str = "jsonl") -> Rows:
        """The records of a result.

        Args:
            source: As `sources` returned it.
            form: "jsonl", "csv" or "text"; text shows only `columns`.
        """

    def name_of(self, source: Source) -> str:
        """The name of a source in records."""
        return str(source)

    def order_results(
        self, results: Iterable[tuple[Source, Result]], options: TaskOptions
    ) -> Iterable[tuple[Any, Any]]:
        """Returns sources and results in the order of writing; overridden by predictors that compare all inputs."""
        return results

    @classmethod
    def columns(cls, options: TaskOptions) -> tuple[str, ...]:
        """The fields of a record that a line of text shows."""
        return cls.fields

    @classmethod
    def records(cls, form: str, output: Output, options: TaskOptions) -> Records:
        """Returns the writer of a command's records.

        Args:
            form: The value of --format.
        Raises:
            UserError: There is no such form.
        """
        return Records(form=form, fields=cls.columns(options), output=output)

    def notes(self, sources: Sequence[Source], options: TaskOptions) -> Iterator[str | UserError]:
        """Yields messages before the results, about sources that are truncated; a UserError is a failure."""
        yield from ()

    def shortfalls(self, results: Sequence[Result]) -> Iterator[str]:
        """Yields messages after the results, about parts of them that could not be used."""
        yield from ()

    def make_terminal_writer(self, sources: Sequence[Source]) -> TerminalWriter | None:
        """Returns a writer that shows texts as they grow; None if the task has none."""
        return None

    def counts(self, result: Any) -> list[int]:
        """Returns the numbers of texts in a result: one number, unless an input has several questions."""
        return [len(result)]

    def width(self, options: TaskOptions) -> int:
        """Number of batch rows per input."""
        return 1

    def prepack(self, rows: int, *, more: bool = True) -> None:
        """Packs the weights for a CPU; the model cannot be trained any more.

        Args:
            rows: Usual number of inputs, or texts, computed at once.
            more: Whether other calls follow; for a single row, packing takes longer than it saves.
        """
        if more or rows > 1:
            prepack(self.model)

    @classmethod
    def with_same_model(cls, predictor: "Predictor") -> Self:
        """Returns a predictor with the same loaded model for another command of its task."""
        copy = cls.__new__(cls)
        vars(copy).update(vars(predictor))
        return copy

    @classmethod
    def describe(cls, about: Metadata) -> Iterator[str]:
        """Yields lines of `vlm info` about what a checkpoint holds besides the model."""
        if "tokenizer" in about:
            tokenizer = about["tokenizer"]
            yield f"tokenizer   {tokenizer['class']} {format_values(tokenizer['options'])}"
        if "form" in about:
            yield f"prompt      {PromptForm.of(about['form']).format_example()!r}"
        if "preprocess" in about:
            yield f"preprocess  {format_values(about['preprocess'])}"


class BatchPredictor(Predictor[Source, Prepared, Result, TaskOptions]):
    """A predictor that computes one batch after another; arguments as in Predictor."""

    def results(
        self, batches: Iterable[Sequence[Prepared] | None], options: TaskOptions, *, watch: Watch | None = None
    ) -> Iterator[tuple[int, Result]]:
        some = (batch or () for batch in takewhile(bool, batches))
        yield from enumerate(chain.from_iterable(self.predict(batch, options) for batch in some))

    @abstractmethod
    def predict(self, batch: Sequence[Prepared], options: TaskOptions) -> Iterable[Result]:
        """The results of a batch of prepared sources."""


def task_of(path: str, loaded: Checkpoint | None = None) -> str:
    """The task of a checkpoint's model.

    Args:
        loaded: The content of the checkpoint, if it has been read before.
    Raises:
        UserError: The checkpoint is damaged.
    """
    loaded = ckpt.read(path) if loaded is None else loaded
    with convert_errors(path):
        return current_task_name(loaded["vlm"]["task"])


def load_predictor(
    path: str, *, trust: str | None = None, dtype: torch.dtype = torch.float32, int8: bool = False, **options: Any
) -> Predictor:
    """Loads the predictor of a checkpoint of any task; reads the file once.

    Raises:
        UserError: As `Predictor` and `find_predictor_class`.
    """
    loaded = ckpt.read(path, dtype=torch.qint8 if int8 else dtype)
    kind = find_predictor_class(path, trust=trust, task=task_of(path, loaded))
    return kind(path, trust=trust, dtype=dtype, int8=int8, loaded=loaded, **options)


def find_predictor_class(path: str, *, trust: str | None = None, task: str | None = None) -> type[Predictor]:
    """Returns the predictor class for a checkpoint's model: the one in TASKS, or one of the user's package.

    A user's task name refers to the predictor class, or to a task class with an attribute `predictor`.

    Args:
        task: The task, if it has been read before.
    Raises:
        UserError: The checkpoint is damaged, its task has no such class, or the package is not trusted.
    """
    task = task_of(path) if task is None else task
    if task in TASKS:
        return import_object(TASKS[task].predictor)
    module, _, name = task.rpartition(".")
    if trust is None or not f"{module}.".startswith(f"{trust}."):
        raise UserError(f"{path}: its task {task!r} is not one of vlm's; {suggest_trust(task.partition('.')[0])}")
    try:
        kind = getattr(importlib.import_module(module), name, None)
    except ImportError as fault:
        raise UserError(f"--trust {trust}: {fault}; install the package that the checkpoint needs") from fault
    kind = getattr(kind, "predictor", kind)
    if not (isinstance(kind, type) and issubclass(kind, Predictor)):
        raise UserError(f"{path}: its task {task} is not a Predictor, nor is its attribute `predictor`")
    return kind


def normalize_pixels(model: nn.Module, preprocess: Preprocess, pixels: Tensor) -> Tensor:
    """Normalises images and converts them to the dtype of the weights: uint8 (B, 3, H, W) -> the same shape."""
    return preprocess.normalize(pixels).to(next(model.parameters()).dtype)


def check_outputs(logits: Tensor, count: int, unit: str) -> None:
    """Checks that a model has as many outputs as the checkpoint states.

    Raises:
        UserError: The two counts differ.
    """
    if logits.shape[-1] != count:
        raise UserError(f"the checkpoint has {count} {unit}, its model {logits.shape[-1]}; use another checkpoint")


def note_truncation(lengths: Iterable[int], room: int, *, names: str = "texts", part: str = "end") -> Iterator[str]:
    """Yields a line on how many texts have more tokens than a model reads, if some do.

    Args:
        part: The part of these that the model does not read.
    """
    lengths = list(lengths)
    if cut := sum(length > room for length in lengths):
        line = f"note: {cut} of {len(lengths)} {names}: more than the {room} tokens that the model reads; the {part} of"
        yield f"{line} each was left out"


def encode_on_device(samples: Sequence[Sequence[Input]], pad_id: int, device: torch.device | str) -> InputRows:
    """The rows of some samples, on a device."""
    return input_rows([EncodedSample(rows) for rows in samples], pad_id).to(device)


class ImagePredictor(Predictor[Source, Prepared, Result, TaskOptions]):
    """A predictor that preprocesses images as in training; arguments as in Predictor."""

    options: ClassVar[Any] = ImageOptions
    arguments: ClassVar[type[Arguments]] = ImageArguments
    stored: ClassVar[Stored] = {"preprocess": Preprocess.from_state}
    preprocess: Preprocess

    def prepare(self, source: Any, options: TaskOptions) -> Any:
        return self.pixels(source if isinstance(source, Tensor) else open_image(source))

    def pixels(self, image: Image.Image | Tensor) -> Tensor:
        """Returns an image as the model reads it, uint8 (3, H, W); tensors are returned unchanged."""
        return image if isinstance(image, Tensor) else self.preprocess(image)


def image_keys(pixels: Sequence[Tensor]) -> list[str]:
    """Returns keys of images that depend only on their pixels."""
    return [blake2b(image.cpu().numpy().tobytes(), digest_size=16).hexdigest() for image in pixels]


class TextPredictor(Predictor[Source, Prepared, Result, TaskOptions]):
    """A predictor with the tokenizer that its model was trained with; arguments as in Predictor.

    Attributes:
        form: The format of its prompts; None for a model without one.
    """

    stored: ClassVar[Stored] = {"tokenizer": tokenizer_from_state, "form": PromptForm.of}
    tokenizer: Tokenizer
    form: PromptForm | None = None

    def check_vocabulary(self, table: Tensor) -> None:
        """Checks that a model has as many tokens as its tokenizer.

        Args:
            table: A tensor with a row per token of the model.
        Raises:
            UserError: The numbers differ.
        """
        check_outputs(table.T, self.tokenizer.vocab_size, "tokens")

    def encode_rows(self, samples: Sequence[Sequence[Input]]) -> InputRows:
        """The rows of some samples, on the model's device."""
        return encode_on_device(samples, self.tokenizer.pad_id, self.device)
