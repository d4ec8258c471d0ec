"""Translation with a photo: the model reads a text and the image that it describes, and translates the text."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from torch import Tensor, nn

from vlm.data.batch import Batch
from vlm.inference.predictor import normalize_pixels
from vlm.models.encoder_decoder import TextAndImageToText
from vlm.models.flop import Work
from vlm.tasks.photo_translation.predict import encode_with_photos
from vlm.tasks.shared.show import example_image, example_record, image_shape
from vlm.tasks.translation.train import TranslatedText, Translation, TranslationMetric, TranslationOptions
from vlm.training.data_module import Data


class PhotoTranslation(Translation):
    """Trains and validates as Translation; a test also translates with other photos and with blank ones.

    Args:
        others: As in Translation; the model is a TextAndImageToText, fields are text, images and translation.
    """

    name = "photo_translation"
    model: TextAndImageToText

    def __init__(self, *, model: TextAndImageToText, **options: Unpack[TranslationOptions]) -> None:
        super().__init__(model=model, **options)
        self.controls = nn.ModuleDict({name: TranslationMetric() for name in ("shuffled", "blank")})

    def work(self, batch: Batch) -> Work:
        return replace(super().work(batch), images=len(batch.ids))

    def extra_inputs(self, batch: Batch) -> dict[str, Tensor]:
        images = batch["images"]
        return {"images": normalize_pixels(self.model, self.preprocess, images if self.training else images[:, 0])}

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        if not batch.ids:
            return
        super().evaluation_step(batch, final=final)
        texts, references = batch["text"], [reference for (reference,) in batch["translation"].references]
        for name, pixels in (("shuffled", batch["images"][:, 1]), ("blank", None)) if final else ():
            context = encode_with_photos(self.model, self.preprocess, texts, pixels)
            hypotheses = self.search.texts(context, final=final)
            pairs = zip(hypotheses, references, strict=True)
            samples = [TranslatedText("", text.text, reference, 0.0) for text, reference in pairs]
            self.controls[name].update(batch.ids, samples)  # type: ignore[operator]

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = super().evaluation_results(split, loss, final=final)
        for name, metric in self.controls.items() if final else ():
            scores = metric.compute()  # type: ignore[operator]
            self.metric.controls[name] = metric.scores  # type: ignore[assignment]
            results |= {f"{score}@{name}": scores[score] for score in self.headlines}
        return results

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        return [f"batch       {image_shape(batch['images'])}", *super().reading(batch, tokens)]

    def example(self, data: Data, folder: Path) -> str:
        text = shlex.quote(example_record(data)[0]["text"])
        return f"vlm translate --text {text} --image {example_image(data, folder)}"
