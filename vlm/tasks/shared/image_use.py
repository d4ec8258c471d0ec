"""Warns if a captioner ignores its images, or writes captions that do not end."""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from vlm.errors import Count, Share, SharedError
from vlm.evaluation.report.content import FEW_STEPS, TRAIN_LONGER
from vlm.io.terminal import fold
from vlm.models.context import Features
from vlm.tasks.captioning.metrics import LanguageMetrics, text_findings
from vlm.training.step.optim import total_steps

SAMPLES = 32  # images of the last validation that are checked for causes
FEW_IMAGES = 10  # fewest distinct references for which captions can be called collapsed


class Pixels(NamedTuple):
    """Mean and standard deviation of images as the encoder reads them."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, images: Tensor) -> "Pixels":
        return cls(images.mean().item(), images.std().item())

    def __str__(self) -> str:
        return f"mean {self.mean:.2f}, deviation {self.deviation:.2f}"


def are_preprocessed_differently(first: Pixels, second: Pixels) -> bool:
    """Returns True if two batches of images look differently preprocessed."""
    ratio = (first.deviation + 0.01) / (second.deviation + 0.01)
    return abs(first.mean - second.mean) > 0.5 or not 0.5 < ratio < 2


def captions_images(task: Any) -> bool:
    """Returns True for a task that keeps the captions of its last validation, with their references."""
    return isinstance(getattr(task, "metrics", None), LanguageMetrics)


class ImageUseMonitor(L.Callback):
    """Warns if captions collapse, do not end or repeat words, or if the loss is the same with another image.

    Each warning is printed once, after several such validations in a row, with the likely causes. No warning is printed
    in the first half of a run, or its first 1,000 steps if they are fewer, because models use images little then.

    Args:
        min_gap: Minimum relative increase of the loss with shuffled images.
        min_distinct: Smallest number of distinct captions, as a share of that of the first references.
        patience: Validations in a row before it warns.
        stop: Whether to stop the run as well, with exit status 1.
    """

    def __init__(
        self, *, min_gap: Share = 0.01, min_distinct: Share = 0.05, patience: Count = 3, stop: bool = False
    ) -> None:
        self.min_gap, self.min_distinct, self.patience, self.stop = min_gap, min_distinct, patience, stop
        self.streaks = {"gap": 0, "distinct": 0, "text": 0}
        self.losses: list[float] = []
        self.warned: set[str] = set()  # names of the signs that were warned of
        self._train_pixels: Pixels | None = None
        self._fault: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"streaks": self.streaks, "losses": self.losses, "warned": sorted(self.warned)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.streaks, self.losses = self.streaks | state_dict["streaks"], list(state_dict["losses"])
        self.warned = set(state_dict.get("warned", ()))  # older checkpoints have none

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._fault is not None:
            raise SharedError(f"{self._fault}\nstopped, as callbacks.grounding.stop=true says", 1)
        task: Any = pl_module
        if self._train_pixels is not None or not captions_images(task) or not batch.ids:
            return
        if not isinstance(batch["images"], Features):
            self._train_pixels = Pixels.of(task.preprocess.normalize(batch["images"]))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit" or not captions_images(pl_module):
            return
        task: Any = pl_module
        results = {name.removeprefix("val/"): value for name, value in task.evaluation.results.items()}
        self.losses.append(results["loss"])
        signs = dict(self.signs(results, task))
        faults = text_findings(task.metrics.first, max_tokens=task.max_tokens, beam=task.search.search.beam)
        signs |= {"text": "\n".join(line for fault in faults for line in fault.lines())} if faults else {}
        self.streaks = {name: count + 1 if name in signs else 0 for name, count in self.streaks.items()}
        if trainer.global_step < min(FEW_STEPS, (total_steps(trainer) or 2 * FEW_STEPS) / 2):
            return
        reported = {name: signs[name] for name, count in self.streaks.items() if count >= self.patience}
        reported = {name: sign for name, sign in reported.items() if name not in self.warned}
        self.warned |= reported.keys()
        if "text" in reported and trainer.is_global_zero:
            self._warn(reported["text"])
        due = [sign for name, sign in reported.items() if name != "text"]
        if not due:
            return
        self._fault = f"the model ignores its images: {'; '.join(due)}" if self.stop else None
        if trainer.is_global_zero:
            causes = [f"  - {cause}" for cause in self.causes(trainer, task)]
            headline = f"the model ignored its images: {'; '.join(due)}"
            self._warn("\n".join([headline, "likely causes:", *causes]))

    def _warn(self, text: str) -> None:
        count = f"{self.patience} validations in a row" if self.patience > 1 else "a validation"
        text = f"\nwarning: in {count}, {text}"
        print(fold(text, sys.stderr), file=sys.stderr, flush=True)

    def signs(self, results: dict[str, float], task: Any) -> Iterator[tuple[str, str]]:
        """Yields name and description of each sign in a validation that the model ignores its images."""
        shuffled_loss = results.get("loss@shuffled")
        if shuffled_loss is not None and shuffled_loss - results["loss"] < self.min_gap * results["loss"]:
            yield (
                "gap",
                f"the loss is {results['loss']:.4f} with the right image and {shuffled_loss:.4f} with another one",
            )
        scored = task.metrics.first
        references = len({texts[0] for texts in scored.references.values()})
        captions = len(set(scored.predictions.values()))
        if references >= FEW_IMAGES and captions < max(2, self.min_distinct * references):
            images = len(scored.predictions)
            yield "distinct", f"{captions} different caption{'s' * (captions > 1)} for {images} images"

    @torch.no_grad()
    def causes(self, trainer: L.Trainer, task: Any) -> list[str]:
        """Returns the likely causes: first too few steps, as in a verdict, then those with signs, then one without."""
        few = (
            f"few steps: {trainer.global_step} so far; {TRAIN_LONGER}: small models may need thousands to see anything"
        )
        causes = [few] if trainer.global_step < FEW_STEPS else []
        causes += _find_encoder_causes(task, self._train_pixels)
        rate = max((group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups), default=0.0)
        if len(self.losses) > 1 and self.losses[-1] > 0.98 * self.losses[0]:
            change = f"val/loss went from {self.losses[0]:.4f} to {self.losses[-1]:.4f}"
            causes.append(f"the learning rate: {change}; optim.lr is {rate:.1e} now")
        return [*causes, "images that do not match their captions: look at some with vlm check-data --out DIR"]


def _find_encoder_causes(task: Any, train: Pixels | None) -> Iterator[str]:
    if all(not parameter.requires_grad for parameter in task.model.encoder.parameters()):
        yield "a frozen encoder (task.freeze): use a trained one, with the preprocessing of its training"
    samples = [sample["image"] for sample in task.evaluation.samples[:SAMPLES]]
    if not samples:
        return
    images = task.preprocess.normalize(torch.stack(samples))
    validation = Pixels.of(images)
    if abs(validation.mean) > 1.5 or not 0.2 < validation.deviation < 4:
        yield f"images that are not normalised ({validation}): set data.preprocess.mean and std to those of the images"
    if train and are_preprocessed_differently(train, validation):
        difference = f"{train} in training, {validation} in validation"
        yield f"mismatched preprocessing: {difference}; compare data.augment, .preprocess"
    states = task.model.encode(images).states.float()
    spread = states.std(0).mean() / states.std().clamp(min=1e-9)  # over images, relative to the overall one
    if len(samples) > 1 and spread < 0.02:
        yield f"an encoder whose output differs by only {spread.item():.1%} between images: dead, or not normalised"
