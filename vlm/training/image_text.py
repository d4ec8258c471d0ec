"""The base of tasks that read an image and write text."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlm.data.batch import Batch
from vlm.data.images.image import Preprocess
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import Count, Share
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.flop import Work
from vlm.models.frozen_features import Features
from vlm.training.feature_cache import as_read
from vlm.training.grounding import GroundingLosses
from vlm.training.losses import Term, token_loss
from vlm.training.optim import Optimization
from vlm.training.show import first_row, image_shape, text_shape
from vlm.training.task import Task


class ImageTextTask(Task):
    """Trains by next-token prediction of text beside an image.

    Attributes:
        written: Name of the field of text, such as "captions".
        segment: Name of a segment of it for a person, such as "caption".
    Args:
        model, optimization, seed, freeze: As in Task; the model is a VisionLanguageModel.
        fields: images, and the field of text.
        label_smoothing: Share of the target spread evenly over the vocabulary.
        max_tokens: Longest text that is decoded, in tokens.
    """

    written: ClassVar[str]
    segment: ClassVar[str]
    model: VisionLanguageModel

    def __init__(
        self,
        *,
        model: VisionLanguageModel,
        fields: Mapping[str, Any],
        seed: int,
        max_tokens: Count,
        optimization: Optimization | None = None,
        freeze: Sequence[str] = (),
        label_smoothing: Share = 0.0,
    ) -> None:
        super().__init__(model=model, fields=fields, optimization=optimization, seed=seed, freeze=freeze)
        self.max_tokens, self.label_smoothing = max_tokens, label_smoothing

    @property
    def tokenizer(self) -> Tokenizer:
        """Reads and writes text."""
        return self.fields[self.written].tokenizer  # type: ignore[return-value]

    @property
    def preprocess(self) -> Preprocess:
        """Makes pixels of images, and normalises them."""
        return self.fields["images"].preprocess  # type: ignore[attr-defined]

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
        self.grounding = GroundingLosses(self.device)

    def add_losses(self, batch: Batch, context: Context, *, controls: bool) -> list[float]:
        """Adds the loss of a batch to that of the split, under control too if asked to; returns each image's.

        Args:
            context: The batch's images, encoded.
        """
        self.unread += [sample.reason for sample in batch.bad]
        blank = self.blank(batch["images"]) if controls else None
        own, losses = self.grounding.read(self.model, context, batch[self.written], blank=blank)
        self.add_loss({"tokens": Term(*own)})
        return losses

    @torch.inference_mode()
    def blank(self, pixels: Tensor) -> Context:
        """The context of an image of the mean color, which is 0 once normalised."""
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
