"""Object detection as language modelling: the model reads an image and a prompt, and writes boxes and classes."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from PIL import Image

from vlm.data.batch import Batch
from vlm.data.boxes import BoxPrompt, ImageBoxes, LabeledBox, parse_objects, prompt_ids, view_codec
from vlm.data.text.box_field import BoxField
from vlm.errors import Count, printable
from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.evaluation.metrics.detection import EXACT, DetectionMetric, ScoredImage, overlap_score, true_classes
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.report.content import Card, Cards, Note, Section, pick_samples
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.tasks.captioning.predict import encode_pixels
from vlm.tasks.detection.pictures import draw_objects
from vlm.tasks.detection.predict import DetectedObject, place_objects, write_objects
from vlm.tasks.shared.policy_gradient import RewardedTextTask, RewardOptions
from vlm.tasks.shared.rewards import Reward, SampledTexts, Target
from vlm.tasks.shared.show import example_image
from vlm.training.data_module import Data
from vlm.untrusted.sizes import JsonValue

IOU = "iou"  # reward: overlap of the objects written with the true ones
READ = 20_000  # training images whose objects the constant control reads


class Detection(RewardedTextTask):
    """Object detection as language modelling (Chen et al. 2022, Pix2Seq): four location tokens and a class per object.

    Args:
        max_tokens: Longest text that is decoded, in tokens.
        val_images: Images whose objects a validation detects; None for all.
        others: As in RewardedTextTask; fields are images and boxes.
    """

    name = "detection"
    headlines = ("ap", "ap50", "recall", EXACT)
    curves = ("ap", "ap50", EXACT)
    text_field, segment_name = "boxes", "objects"

    def __init__(
        self,
        *,
        model: VisionLanguageModel,
        max_tokens: Count,
        val_images: Count | None = None,
        **options: Unpack[RewardOptions],
    ) -> None:
        super().__init__(model=model, max_tokens=max_tokens, **options)
        self.metric, self.val_images = DetectionMetric(), val_images

    @property
    def box_field(self) -> BoxField:
        field = self.fields[self.text_field]
        assert isinstance(field, BoxField)
        return field

    reward_names = (IOU,)

    def prompt_tokens(self, reference: BoxPrompt) -> list[int]:
        return [self.tokenizer.bos_id, *self.tokenizer.encode(reference.prompt)]

    @property
    def sampled_tokens(self) -> int:
        return max(1, min(self.max_tokens, self.model.decoder.max_len - self.box_field.max_len // 2))

    def build_metrics(self, weights: Mapping[str, float]) -> Reward:
        """Returns the weighted overlap of the objects in each text with the true ones, in the view of the model."""
        codec, tokenizer, known = self.box_field.codec(), self.tokenizer, set(self.box_field.classes)

        def score(target: Target, tokens: Sequence[int]) -> float:
            assert target.boxes is not None
            found = list(parse_objects(tokenizer, tokenizer.location_ids, tokens, [0.0] * len(tokens)))
            valid = [item for item in found if item is not None and item.label in known]
            boxes = [LabeledBox(item.label, codec.decode(item.numbers)) for item in valid]
            return overlap_score(target.boxes.boxes, boxes, len(found) - len(valid))

        def reward(samples: SampledTexts) -> Floats:
            rows = zip(samples.targets, samples.tokens, strict=True)
            return weights[IOU] * np.array([[score(target, text) for text in texts] for target, texts in rows])

        return reward

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        """Adds a batch's loss and the objects found; in a final evaluation also those of the controls.

        In the shuffled control, the objects found in an image are compared with those of its partner.
        """
        context = encode_pixels(self.model, self.preprocess, batch["images"])  # shared by losses and objects
        self.add_losses(batch, context)
        if not batch.ids or (not final and self.evaluation.has_samples(self.val_images)):
            return
        rows, partners = batch["boxes"], batch["boxes"].partners
        truths = [truth for (truth,) in rows.references]
        written = self._write(context)
        found = [self._score(id, truth, item) for id, truth, item in zip(batch.ids, truths, written, strict=True)]
        self.metric.update(found)
        for image in found:
            self.evaluation.samples.append({"image_id": image.id, "line": _line(image)})
        if not final:
            return
        (blank,) = self._write(self.blank(batch["images"]))
        self.metric.update(
            (self._score(id, truth, blank) for id, truth in zip(batch.ids, truths, strict=True)), "blank"
        )
        if partners.indices != rows.indices:  # a lone sample is its own partner
            pairs = zip(partners.ids, partners.references, written, strict=True)
            self.metric.update((self._score(id, truth, item) for id, (truth,), item in pairs), "shuffled")

    def _write(self, context: Context) -> list[tuple[list[Any], int]]:
        """What the model writes about encoded images when it is asked for all objects."""
        prompts = [prompt_ids(self.tokenizer, ())] * len(context.states)
        options: dict[str, Any] = {"max_tokens": self.max_tokens, "known": self.box_field.classes}
        return write_objects(self.model, self.tokenizer, context, prompts, **options)

    def _score(self, id: str, truth: ImageBoxes, written: tuple[list[Any], int]) -> ScoredImage:
        """Places what the model wrote in an image with known objects."""
        view, codec = self.preprocess.view(truth.size), view_codec(self.preprocess.image_size, self.box_field.bins)
        placed = place_objects(written, codec, view, truth.size)
        scored = [(LabeledBox(item.label, item.box), item.score) for item in placed.objects]
        return ScoredImage(id, truth, scored, placed.unparsed)

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = self.metric.compute() | self.grounding.results(loss, self.sum_over_ranks)
        if final:
            train = islice(self.data.split("train").records(), READ)
            results |= self.metric.controls(record["boxes"] for record in train)
            results |= self.metric.intervals(seed=self.seed)
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        return self.metric.scorers(metric, control)

    def notes(self) -> list[str]:
        about = (
            "ap: COCO's average precision at IoU 0.5 to 0.95; recall: the mean over these, up to 100 objects a class"
        )
        exact = f"{EXACT}: share of images with exactly the right classes; unparsed: share of invalid objects"
        return [f"({about})", f"({exact})", *super().notes()]

    def details(self) -> dict[str, JsonValue]:
        images = {}
        for image in self.metric.images:
            truth = [{"label": item.label, "box": list(item.box), "crowd": item.crowd} for item in image.truth.boxes]
            found = [{"label": item.label, "box": list(item.box), "score": score} for item, score in image.found]
            images[image.id] = {"size": list(image.truth.size), "objects": truth, "found": found}
        return {"images": images}  # type: ignore[dict-item]

    def predictions(self) -> list[dict[str, JsonValue]]:
        """The objects found, as COCO's results are, except for names of images and classes in place of ids."""
        rows: list[dict[str, JsonValue]] = []
        for image in self.metric.images:
            for item, score in image.found:
                left, top, right, bottom = item.box
                edges: list[JsonValue] = [left, top, right - left, bottom - top]
                rows.append({"image_id": image.id, "category": item.label, "bbox": edges, "score": score})
        return rows

    def report(self) -> list[Section]:
        """Random images, and images with other classes than the true ones, with the boxes of the model."""
        wrong = [image for image in self.metric.images if not image.is_exact]
        kinds = {"Random images": self.metric.images, "Images with wrong classes": wrong}
        note = Note("Boxes of the model in colours, with class and score; true boxes in grey.")
        return [
            Section(title, [note, Cards([_card(image) for image in pick_samples(some)])])
            for title, some in kinds.items()
            if some
        ]

    def example(self, data: Data, folder: Path) -> str:
        return f"vlm detect {example_image(data, folder)}"


def _card(scored: ScoredImage) -> Card:
    objects = [DetectedObject(item.label, score, item.box) for item, score in scored.found]
    truth = [item.box for item in scored.truth.boxes]

    def draw(image: Image.Image, longest: int) -> Image.Image:
        return draw_objects(image, objects, truth, longest=longest)

    return Card(image=scored.id, text=_line(scored), lines=[scored.id], draw=draw)


def _line(image: ScoredImage) -> str:
    found = ", ".join(f"{item.label} {score:.0%}" for item, score in image.found) or "nothing"
    mark = "(exact)" if image.is_exact else f"(true: {', '.join(true_classes(image.truth)) or 'nothing'})"
    return f"{printable(found)} {printable(mark)}"
