"""The base of tasks that read an image and write text."""

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from vlm.data.batch import Batch
from vlm.data.pairs import block_of
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import Count
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.flop import Work
from vlm.models.frozen_features import Features
from vlm.tasks.shared.grounding import GroundingLosses
from vlm.tasks.shared.show import first_row, image_shape, text_shape
from vlm.training.feature_cache import as_read
from vlm.training.step.losses import Term, token_loss
from vlm.training.step.task import Task, TaskOptions


class ImageTextTask(Task):
    """Trains by next-token prediction of text given an image.

    Attributes:
        written: Name of the field of text, such as "captions".
        segment: Name of one of its segments to print, such as "caption".
    Args:
        model, options: As in Task; the model is a VisionLanguageModel, fields are images, and the field of text.
        max_tokens: Most tokens of a decoded text.
    """

    written: ClassVar[str]
    segment: ClassVar[str]
    model: VisionLanguageModel

    def __init__(self, *, model: VisionLanguageModel, max_tokens: Count, **options: Unpack[TaskOptions]) -> None:
        super().__init__(model=model, **options)
        self.max_tokens = max_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text."""
        return self.fields[self.written].tokenizer  # type: ignore[return-value]

    def work(self, batch: Batch) -> Work:
        rows, length = batch[self.written].tokens.shape
        return Work(len(batch.ids), rows, length, kept=isinstance(batch["images"], Features))

    def loss(self, batch: Batch) -> dict[str, Term]:
        rows = batch[self.written]
        hidden = self.model(as_read(batch["images"], self.preprocess), rows.tokens, rows.segments)
        smoothing = self.label_smoothing
        return {"tokens": Term(*token_loss(hidden, rows.targets, self.model.head_parts, label_smoothing=smoothing))}

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        size = len(self.data.split(self.evaluation.split))
        self.grounding = GroundingLosses(size, self.device)
        self.controlled = range(size) if self.trainer.testing else block_of(0, size)

    def add_losses(self, batch: Batch, context: Context) -> list[float]:
        """Adds a batch's loss to that of the split, with controls for `controlled` samples; returns each image's loss.

        Args:
            context: The batch's images, encoded.
        """
        rows = batch[self.written]
        blank = self.blank(batch["images"]) if any(place in self.controlled for place in rows.places) else None
        (sums, counts), losses = self.grounding.read(self.model, context, rows, blank=blank)
        self.evaluation.add_loss({"tokens": Term(sums.sum(), counts.sum())})
        return losses

    def blank(self, pixels: Tensor) -> Context:
        """Encodes an image of the mean colour, which is 0 after normalisation."""
        with torch.autocast(pixels.device.type, enabled=False):
            return self.model.encode(torch.zeros(1, *pixels.shape[1:], device=pixels.device))

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        rows = batch[self.written]
        shapes = f"{image_shape(batch['images'])}, {text_shape(rows.tokens, rows.segments)}"
        lines = [f"batch       {shapes}", f"sample      {batch.ids[0]}"]
        show: dict[str, Any] = {"name": self.segment, "shown": tokens, "scored": rows.scored}
        return lines + first_row(rows.tokens, rows.segments, self.tokenizer, **show)

    def description(self) -> dict[str, Any]:
        return {**super().description(), "max_tokens": self.max_tokens}
