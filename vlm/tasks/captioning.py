"""Image captioning: the model reads an image and writes what a person would say of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vlm.data.batch import CaptionBatch
from vlm.data.images.image import Preprocess
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import Count, Share
from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.metrics.controls import caption_controls, novelty
from vlm.inference.captioning import caption_pixels
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.flop import Work
from vlm.training.data_module import Data
from vlm.training.feature_cache import as_read
from vlm.training.grounding import BATCHES, GroundingLosses
from vlm.training.losses import next_token_labels, token_loss
from vlm.training.optim import Optimization
from vlm.training.show import caption_line, example_image, first_row, image_shape, text_shape
from vlm.training.task import Task


class Captioning(Task):
    """Trains by next-token prediction, validates by captioning freely.

    Args:
        model, optimization, seed, freeze: As in Task; the model is a VisionLanguageModel.
        tokenizer: Reads and writes captions.
        preprocess: How images become pixels; also normalises them.
        label_smoothing: Share of the target spread evenly over the vocabulary.
        max_tokens: Longest caption that is decoded, in tokens.
        val_captions: Images that a validation captions; None for all.
    """

    name = "captioning"
    model: VisionLanguageModel

    def __init__(
        self,
        *,
        model: VisionLanguageModel,
        tokenizer: Tokenizer,
        preprocess: Preprocess,
        seed: int,
        max_tokens: Count,
        optimization: Optimization | None = None,
        freeze: Sequence[str] = (),
        label_smoothing: Share = 0.0,
        val_captions: Count | None = None,
    ) -> None:
        super().__init__(model=model, optimization=optimization, seed=seed, freeze=freeze)
        self.tokenizer, self.preprocess = tokenizer, preprocess
        self.max_tokens, self.val_captions = max_tokens, val_captions
        self.label_smoothing = label_smoothing
        self.captions = CaptionMetric()

    def work(self, batch: CaptionBatch) -> Work:
        rows, length = batch.tokens.shape
        return Work(len(batch.images), rows, length, kept=batch.images.is_floating_point())

    def loss(self, batch: CaptionBatch) -> tuple[Tensor, Tensor]:
        hidden = self.model(as_read(batch.images, self.preprocess), batch.tokens, batch.segments)
        labels = next_token_labels(batch.tokens, batch.segments)
        return token_loss(hidden, labels, self.model.head_weight, label_smoothing=self.label_smoothing)

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        self.captions.reset()
        self.grounding = GroundingLosses(self.device)

    def evaluation_step(self, batch: CaptionBatch, limit: int | None, *, controls: bool) -> None:
        self.unread += [sample.reason for sample in batch.bad]
        images = self.preprocess.normalize(batch.images)
        own, losses = self.grounding.read(self.model, images, batch, controls=controls)
        self.add_loss(*own)
        if limit is not None and len(self.samples) >= -(-limit // self.trainer.world_size):
            return
        found = caption_pixels(self.model, self.tokenizer, self.preprocess, batch.images, max_tokens=self.max_tokens)
        texts = [caption.text for caption in found]
        self.captions.update(batch.ids, texts, batch.references, losses)
        rows = zip(batch.ids, batch.images, texts, batch.references, losses, strict=True)
        for id, image, caption, references, loss in rows:
            sample = {"image_id": id, "caption": caption, "references": references, "loss": loss, "image": image}
            self.samples.append({**sample, "line": caption_line(caption, references)})

    def validation_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        self.evaluation_step(batch, self.val_captions, controls=batch_idx < BATCHES)

    def test_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        self.evaluation_step(batch, None, controls=True)

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = self.captions.compute() | self.grounding.results(loss, self._summed)
        if final:
            train = self.trainer.datamodule.split("train")  # type: ignore[attr-defined]
            results |= caption_controls(self.captions, train, seed=self.seed)
            results["novelty"] = novelty(self.captions.predictions.values(), train)
            results |= self.captions.intervals(seed=self.seed)
        return results

    def details(self) -> dict[str, Any]:
        return {"images": self.captions.per_image()}

    def predictions(self) -> list[dict[str, Any]]:
        return [{"image_id": id, "caption": caption} for id, caption in self.captions.predictions.items()]

    def reading(self, batch: CaptionBatch, tokens: int) -> list[str]:
        shapes = f"{image_shape(batch.images)}, {text_shape(batch.tokens, batch.segments)}"
        lines = [f"batch       {shapes}", f"sample      {batch.ids[0]}"]
        return lines + first_row(batch.tokens, batch.segments, self.tokenizer, name="caption", shown=tokens)

    def example(self, data: Data, folder: Path) -> str:
        return f"vlm caption {example_image(data, folder)}"

    def description(self) -> dict[str, Any]:
        return {
            "task": self.name,
            "tokenizer": self.tokenizer.state(),
            "preprocess": self.preprocess.state(),
            "max_tokens": self.max_tokens,
        }
