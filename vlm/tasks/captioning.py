"""Image captioning: the model reads an image and writes what a person would say of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Unpack

from vlm.data.batch import Batch
from vlm.errors import Count, Range
from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.metrics.controls import caption_controls, novelty
from vlm.evaluation.report.sections import SHOWN, Card, Cards, Note, Pictures, Section, random_places
from vlm.inference.attention import word_maps
from vlm.inference.attention_picture import attention_picture
from vlm.inference.captioning import encode_pixels
from vlm.inference.writing import likeliest
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.nn.step.replay import StepperPool
from vlm.training.data_module import Data
from vlm.training.image_text import ImageTextTask
from vlm.training.losses import Term
from vlm.training.self_critical import SelfCritical
from vlm.training.show import caption_line, example_image
from vlm.training.task import TaskOptions

LOOKED_AT = 3  # captions of a report with pictures of the model's attention


class Captioning(ImageTextTask):
    """Trains by next-token prediction, or on a metric of drawn captions; validates by captioning freely.

    Args:
        val_captions: Images that a validation captions; None for all.
        reward, reward_samples: Metric that training raises, or the weights of several, and captions of an image that
            are drawn for it; None for next-token prediction.
        others: As in ImageTextTask; fields are images, and captions.
    """

    name = "captioning"
    headlines = ("cider", "bleu4", "rouge_l", "exact_match")
    curves = ("cider", "bleu4", "exact_match", "distinct", "length_ratio")
    written, segment = "captions", "caption"

    def __init__(
        self,
        *,
        model: VisionLanguageModel,
        max_tokens: Count,
        val_captions: Count | None = None,
        reward: Literal["cider", "bleu4", "rouge_l"] | dict[str, float] | None = None,
        reward_samples: Annotated[int, Range(2)] = 5,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, max_tokens=max_tokens, **options)
        self.val_captions, self.captions = val_captions, CaptionMetric()
        self.critic = None if reward is None else SelfCritical(self, reward, samples=reward_samples)

    def loss(self, batch: Batch) -> dict[str, Term]:
        return super().loss(batch) if self.critic is None else self.critic.loss(batch)

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        self.captions.reset()
        self.steps = StepperPool()  # a GPU records a decode step once for all batches

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        pixels, rows = batch["images"], batch["captions"]
        context = encode_pixels(self.model, self.preprocess, pixels)  # once, for its losses and its captions
        losses = self.add_losses(batch, context)
        if not final and self.has_samples(self.val_captions):
            return
        captions = likeliest(self.model, self.tokenizer, context, max_tokens=self.max_tokens, pool=self.steps)
        texts = [caption.text for caption in captions]
        self.captions.update(batch.ids, texts, rows.references, losses)
        for id, image, caption, references, loss in zip(batch.ids, pixels, texts, rows.references, losses, strict=True):
            sample = {"image_id": id, "caption": caption, "references": references, "loss": loss, "image": image}
            self.samples.append({**sample, "line": caption_line(caption, references)})

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        del self.steps  # and its memory
        results = self.captions.compute() | self.grounding.results(loss, self._summed)
        results |= self.critic.faults(self.captions) if self.critic else {}
        if final:
            train = self.trainer.datamodule.split("train")  # type: ignore[attr-defined]
            results |= caption_controls(self.captions, train, seed=self.seed)
            results["novelty"] = novelty(self.captions.predictions.values(), train)
            results |= self.captions.intervals(seed=self.seed)
        return results

    @property
    def remark(self) -> str:  # type: ignore[override]
        return self.captions.units.note

    def notes(self) -> list[str]:
        return [f"({self.remark})"] if self.remark else []

    def details(self) -> dict[str, Any]:
        return {"images": self.captions.per_image()}

    def predictions(self) -> list[dict[str, Any]]:
        return [{"image_id": id, "caption": caption} for id, caption in self.captions.predictions.items()]

    def report(self) -> list[Section]:
        """Captions at random, the best and the worst by CIDEr and ROUGE-L, and where the model looked."""
        images = self.captions.per_image()
        ranked = sorted(images, key=lambda name: (-images[name]["cider"], -images[name]["rouge_l"], name))
        count = min(SHOWN, -(-len(ranked) // 2))
        kinds = {"Random captions": [ranked[at] for at in random_places(len(ranked))]}
        kinds |= {"Best captions": ranked[:count], "Worst captions": ranked[::-1][:count]}
        sections = [
            Section(title, [Cards([_card(name, images[name]) for name in names])]) for title, names in kinds.items()
        ]
        if drawn := [picture for sample in self.samples[:LOOKED_AT] for picture in self._attention(sample)]:
            note = "Bright is where the last layer looked when it wrote the word above, on the mean of its heads."
            sections.append(Section("Where it looked", [Note(note), Pictures(drawn)]))
        return sections

    def _attention(self, sample: Mapping[str, Any]) -> list[tuple[str, bytes]]:
        """A sample's caption with a picture of where the model looked, if its layers offer that."""
        pixels = sample["image"].to(self.device)
        maps = word_maps(self.model, self.tokenizer, self.preprocess, pixels, sample["caption"])
        return [(sample["caption"], attention_picture(pixels, maps))] if maps else []

    def example(self, data: Data, folder: Path) -> str:
        return f"vlm caption {example_image(data, folder)}"


def _card(name: str, row: Mapping[str, Any]) -> Card:
    scores = f"CIDEr {row['cider']:.2f}, ROUGE-L {row['rouge_l']:.2f}"
    scores += f", loss {row['loss']:.2f}" if "loss" in row else ""
    return Card(image=name, text=row["caption"], lines=[scores, name], references=row["references"])
