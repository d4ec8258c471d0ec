"""Distillation: a student learns a teacher's predictions of its training inputs (Hinton et al. 2015)."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from vlm.checkpoint.stored import Checkpoint, thaw
from vlm.data.batch import Batch, Targets
from vlm.data.images.image import Preprocess
from vlm.errors import Count, Range, UserError
from vlm.nn.distillation_loss import (
    Predictions,
    TeacherStates,
    divergence,
    predict,
    select_top,
    soften,
    vocabulary_divergence,
)
from vlm.tasks.shared.frozen_models import check_same_weights, read_frozen
from vlm.tasks.shared.teacher_cache import PredictionCache
from vlm.tasks.shared.teacher_fit import TeacherFit
from vlm.training.image_cache import as_read
from vlm.training.step.losses import Term
from vlm.training.step.task import Task
from vlm.untrusted.sizes import JsonValue

KEY = "task.teacher"
# Returns what a model computes of a batch: hidden states (B, L, D), or logits (B, C). Images are normalised.
Read = Callable[[Any, Batch, Tensor | None], Tensor]


class Teacher:
    """The config of a teacher: a trained model, and how much of its predictions a student learns.

    The loss of a student is ``weight * temperature**2 * divergence(teacher, student) + (1 - weight) * loss``, over the
    same tokens or samples.

    Args:
        path: Checkpoint, run or folder of the teacher; None to train without one.
        temperature: Divisor of the logits of both models in the divergence; higher values weigh unlikely outcomes more.
        weight: Share of the divergence in the loss.
        beta: Divergence: 0 for forward KL, 1 for reverse KL, a number between for generalised Jensen-Shannon.
        top_k: Number of the teacher's likeliest outcomes that are compared one by one; the others are compared as one
            outcome. None for all.
        cache: Whether to compute the teacher's predictions once and to store them in the cache.
    Raises:
        UserError: An option has no effect, because there is no teacher.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        temperature: Annotated[float, Range(above=0)] = 1.0,
        weight: Annotated[float, Range(above=0, high=1)] = 0.5,
        beta: Annotated[float, Range(0, 1)] = 0.0,
        top_k: Count | None = None,
        cache: bool = False,
    ) -> None:
        self.path, self.top_k, self.cache = path, top_k, cache
        self.temperature, self.weight, self.beta = float(temperature), float(weight), float(beta)
        defaults = inspect.signature(Teacher).parameters.items()
        if path is None and (changed := [name for name, given in defaults if getattr(self, name) != given.default]):
            raise UserError(f"{KEY}.{changed[0]}: has no effect without a teacher; set {KEY}.path, or leave it out")


class Distillation(ABC):
    """The loss of a student, and its teacher, which is frozen, in evaluation mode, and read on first use.

    The teacher computes in the precision of training and reads the images of the batch, also augmented or mixed ones.
    It is no submodule of the task, so that checkpoints do not hold it. A subclass defines what is compared.

    Args:
        task: The student's task.
        kind: Class of the models that the task trains.
        options: The teacher.
        read: Returns what a model computes of a batch.
    Attributes:
        expected: Hash of the weights that the teacher must have; "" for any.
        weights_hash: Hash of the teacher's weights, once it has been read.
    Raises:
        UserError: An option of the task has no effect.
    """

    def __init__(self, task: Task, kind: type[nn.Module], options: Teacher, read: Read) -> None:
        self.task, self.kind, self.options, self._read = task, kind, options, read
        self.path = str(options.path)
        self.expected = self.weights_hash = ""
        self._model: nn.Module | None = None
        self._preprocess: Preprocess | None = None
        self._cached: PredictionCache | None = None
        if options.weight == 1:
            for name in ("label_smoothing", "z_loss"):
                if getattr(task, name, 0):
                    raise UserError(f"task.{name}: has no effect, because {KEY}.weight=1; leave it out")

    @property
    def student(self) -> nn.Module:
        """The student's model."""
        return self.task.model

    @abstractmethod
    def num_outcomes(self, model: nn.Module) -> int:
        """Returns the number of outcomes that a model predicts."""

    @abstractmethod
    def divergence(self, batch: Batch, outputs: Tensor, images: Tensor | None) -> Tensor:
        """Returns the divergence of the student's outputs for a batch, summed over tokens or samples: ()."""

    @abstractmethod
    def predictions(self, batch: Batch) -> Iterator[tuple[str, Predictions]]:
        """Yields the name of each sample of a batch, and the teacher's predictions of it."""

    def model(self) -> Any:
        """Returns the teacher, on the device and in the type of the student.

        Raises:
            UserError: It cannot be read, does not fit the student, or has other weights than when training began.
        """
        if self._model is None:
            loaded, model = read_frozen(self.path)
            self._check(loaded, model)
            self.weights_hash = check_same_weights(model, self.expected, f"{KEY}.path", "the teacher", self.path)
            if self.task.preprocess is not None:
                self._preprocess = Preprocess.from_state(loaded["vlm"]["preprocess"])
            self._model = model
        parameter = next(self.student.parameters())
        return self._model.to(parameter.device, parameter.dtype)

    def _check(self, loaded: Checkpoint, model: nn.Module) -> None:
        config = thaw(self.task.about["config"]) if "config" in self.task.about else None
        fit = TeacherFit(self.path, loaded, self.task.fields, config)
        if not isinstance(model, self.kind):
            what = f"is a {type(model).__name__}, which task={self.task.name} does not train"
            raise fit.refuse(f"{what}; use a model of this task")
        fit.check(model)
        if (theirs := self.num_outcomes(model)) != (ours := self.num_outcomes(self.student)):
            raise fit.refuse(f"predicts {theirs:,} outcomes, the student {ours:,}; use a teacher of the same number")
        if self.task.preprocess is not None and self.task.data.cache_features:
            remedy = "set data.cache_features=false"
            raise fit.refuse(f"reads images, but the student reads cached features of its encoder; {remedy}")

    def prepare(self) -> None:
        """Reads and checks the teacher before training, and computes or reads its predictions if they are cached.

        Raises:
            UserError: See `model`; or predictions cannot be cached; the message names the option.
        """
        outcomes, top_k = self.num_outcomes(self.student), self.options.top_k
        if top_k is not None and top_k >= outcomes:
            raise UserError(f"{KEY}.top_k: {top_k} is not less than the {outcomes:,} outcomes; leave it out")
        self.model()
        self.expected = self.weights_hash
        if self.options.cache:
            self._cached = PredictionCache(
                self.task, self.predictions, (self.weights_hash, str(self.options.temperature), str(top_k)), outcomes
            )
            self._model = None  # frees its memory

    def terms(
        self, batch: Batch, own: Mapping[str, Term], outputs: Tensor, images: Tensor | None = None
    ) -> dict[str, Term]:
        """Returns the terms of the loss: the student's own and the divergence.

        Args:
            own: The student's own term, by name.
            outputs: What the student computed of the batch.
            images: The images that it read.
        """
        ((name, term),) = own.items()
        options, total = self.options, self.divergence(batch, outputs, images)
        teacher = Term(total, term.count, weight=options.weight * options.temperature**2)
        return {name: replace(term, weight=1 - options.weight), "teacher": teacher}

    @torch.no_grad()
    def read(self, batch: Batch, images: Tensor | None) -> Tensor:
        """Returns what the teacher computes of a batch.

        Args:
            images: The images as the student reads them; None to take those of the batch.
        """
        model, ours = self.model(), self.task.preprocess
        if images is None and ours is not None:
            images = as_read(batch["images"], ours)  # type: ignore[assignment]
        if images is not None and self._preprocess is not None:
            images = renormalize(images, ours, self._preprocess)
        return self._read(model, batch, images)

    def stored(self, batch: Batch, count: int) -> Predictions | None:
        """Returns the cached predictions of a batch's tokens or samples; None if they are not cached.

        Args:
            count: Their number.
        """
        return None if self._cached is None else self._cached.look_up(batch.ids, count, self.task.device)


def renormalize(images: Tensor, ours: Preprocess, theirs: Preprocess) -> Tensor:
    """Converts images of one normalisation to another: (B, 3, H, W) -> (B, 3, H, W)."""
    if (tuple(ours.mean), tuple(ours.std)) == (tuple(theirs.mean), tuple(theirs.std)):
        return images
    mean, std, new_mean, new_std = (
        images.new_tensor(values)[:, None, None] for values in (ours.mean, ours.std, theirs.mean, theirs.std)
    )
    return images * (std / new_std) + (mean - new_mean) / new_std


class TokenDistillation(Distillation):
    """Distillation of predictions of tokens.

    Args:
        text_field: Name of the field of texts.
        others: See Distillation; `read` returns hidden states.
    """

    def __init__(self, task: Task, kind: type[nn.Module], options: Teacher, read: Read, text_field: str) -> None:
        super().__init__(task, kind, options, read)
        self.text_field = text_field

    def num_outcomes(self, model: nn.Module) -> int:
        return len(model.head_parts.weight)  # type: ignore[union-attr,arg-type]

    def divergence(self, batch: Batch, outputs: Tensor, images: Tensor | None) -> Tensor:
        targets: Targets = batch[self.text_field].targets
        head: Any = self.student.head_parts
        teacher: TeacherStates | Predictions | None = self.stored(batch, targets.count)
        if teacher is None:
            teacher = self._states(self.read(batch, images), targets)
        picked = head.apply_transform(targets.pick(outputs))
        options = {"temperature": self.options.temperature, "beta": self.options.beta}
        return vocabulary_divergence(picked, head.weight, head.bias, teacher, **options)

    def _states(self, hidden: Tensor, targets: Targets) -> TeacherStates:
        head = self.model().head_parts
        return TeacherStates(head.apply_transform(targets.pick(hidden)), head.weight, head.bias, self.options.top_k)

    def predictions(self, batch: Batch) -> Iterator[tuple[str, Predictions]]:
        targets: Targets = batch[self.text_field].targets
        hidden = self.read(batch, None)
        rows, length = hidden.shape[:2]
        counts = [length] * rows
        if targets.places is not None:
            counts = torch.bincount(targets.places // length, minlength=rows).tolist()
        start, states = 0, self._states(hidden, targets)
        for name, count in zip(batch.ids, counts, strict=True):
            part = states._replace(hidden=states.hidden[start : start + count])
            yield name, predict(part, self.options.temperature)
            start += count


class ClassDistillation(Distillation):
    """Distillation of predictions of classes; `read` returns logits."""

    def num_outcomes(self, model: nn.Module) -> int:
        return len(model.head.weight)  # type: ignore[union-attr,arg-type]

    def divergence(self, batch: Batch, outputs: Tensor, images: Tensor | None) -> Tensor:
        teacher = self.stored(batch, len(outputs))
        if teacher is None:
            teacher = self._predict(self.read(batch, images))
        options = {"temperature": self.options.temperature, "beta": self.options.beta}
        return divergence(outputs, teacher, **options).sum()

    def _predict(self, logits: Tensor) -> Predictions:
        logprobs = soften(logits, self.options.temperature)
        return logprobs if self.options.top_k is None else select_top(logprobs, self.options.top_k)

    def predictions(self, batch: Batch) -> Iterator[tuple[str, Predictions]]:
        predictions = self._predict(self.read(batch, None))
        rows: Any = predictions.split(1)
        yield from zip(batch.ids, rows, strict=True)


class DistilledTask(Task):
    """Base of tasks whose model may learn from a teacher.

    Attributes:
        distillation: The teacher and its loss; None without a teacher.
    """

    distillation: Distillation | None = None

    def use_start(self, start: Callable[[], nn.Module], stored: Mapping[str, Any]) -> None:
        super().use_start(start, stored)
        if self.distillation is not None:
            self.distillation.expected = str(stored.get("teacher", ""))

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.distillation is not None:
            self.distillation.prepare()

    def description(self) -> dict[str, JsonValue]:
        weights_hash = "" if self.distillation is None else self.distillation.weights_hash
        return super().description() | ({"teacher": weights_hash} if weights_hash else {})

    def distilled_counts(self, batch: Batch, name: str, count: int) -> dict[str, int] | None:
        """Returns the counts of a batch's loss terms.

        Args:
            name, count: Of the term that the loss has without a teacher.
        """
        return super().counts(batch) if self.distillation is None else {name: count, "teacher": count}
