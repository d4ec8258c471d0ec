"""Compares images with texts by a trained dual encoder: zero-shot `classify`, `retrieve`, CLIPScore."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vlm.data.batch import InputRows
from vlm.data.images.image import Preprocess
from vlm.data.text.inputs import encode_text
from vlm.errors import UserError
from vlm.inference.arguments import check_utf8, read_texts
from vlm.inference.command_options import LabelOptions, RetrievalOptions
from vlm.inference.inputs import ImageSource, open_image
from vlm.inference.options import as_list
from vlm.inference.predictor import (
    BatchPredictor,
    ImagePredictor,
    Rows,
    TextPredictor,
    check_outputs,
    normalize_pixels,
    note_truncation,
)
from vlm.models.dual_encoder import DualEncoder
from vlm.tasks.classification.predict import Classes, classes_record, rank_classes

PLACE = "{}"  # placeholder of the class in a prompt
ROWS = 256  # texts embedded at a time
CACHE_SIZE = 16  # lists of classes whose embeddings are cached

Texts = tuple[str, ...]
Candidates = Texts | tuple[Texts, Texts]  # texts, or classes with prompts
Source = tuple[ImageSource, Candidates]
DualOptions = LabelOptions | RetrievalOptions


@torch.inference_mode()
def embed_pixels(model: DualEncoder, preprocess: Preprocess, pixels: Tensor) -> Tensor:
    """Embeds preprocessed images, for evaluation and commands: uint8 (B, 3, H, W) -> (B, E)."""
    with torch.autocast(pixels.device.type, enabled=False):
        return model.embed_images(normalize_pixels(model, preprocess, pixels))


@torch.inference_mode()
def embed_rows(model: DualEncoder, rows: InputRows) -> Tensor:
    """Embeds texts, for evaluation and commands: (T, E)."""
    assert rows.places is not None
    with torch.autocast(rows.tokens.device.type, enabled=False):
        return model.embed_texts(rows.tokens, rows.segments, rows.places, rows.layout)


class DualPredictor(BatchPredictor, ImagePredictor, TextPredictor):
    """A trained dual encoder of images and texts; arguments as in Predictor."""

    task = "contrastive"
    model: DualEncoder

    @cached_property
    def embed_cached(self) -> Callable[[Texts], Tensor]:
        """`embed_texts` with a cache."""
        return lru_cache(CACHE_SIZE)(self.embed_texts)

    def check(self) -> None:
        self.check_vocabulary(self.model.text_encoder.token_embed.weight)
        blank = self.pixels(Image.new("RGB", (1, 1)))
        check_outputs(self.embed_images([blank]), self.embed_texts(("a",)).shape[-1], "values of an embedding")

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Returns embeddings (T, E) of texts, truncated to the model's length."""
        rows = [[encode_text(self.tokenizer, self.model.max_len, text)._replace(places=[0])] for text in texts]
        parts = (rows[start : start + ROWS] for start in range(0, len(rows), ROWS))
        embeddings = [embed_rows(self.model, self.encode_rows(part)) for part in parts]
        return torch.cat(embeddings)

    def embed_images(self, pixels: Sequence[Tensor]) -> Tensor:
        """Returns embeddings (B, E) of a batch of images from `pixels`."""
        return embed_pixels(self.model, self.preprocess, torch.stack(list(pixels)).to(self.device))

    def prepare(self, source: Source, options: DualOptions) -> tuple[Tensor, Candidates]:
        image, texts = source
        return super().prepare(image, options), texts

    def predict(self, batch: Sequence[tuple[Tensor, Candidates]], options: DualOptions) -> Iterator[Classes | Tensor]:
        for texts, group in groupby(batch, lambda item: item[1]):
            yield from self.compare(self.embed_images([pixels for pixels, _ in group]), texts, options)

    def notes(self, sources: Sequence[Source], options: DualOptions) -> Iterator[str | UserError]:
        texts = dict.fromkeys(text for some in {texts for _, texts in sources} for text in self.expand_texts(some))
        yield from note_truncation((len(self.tokenizer.encode(text)) for text in texts), self.model.max_len - 2)

    def expand_texts(self, texts: Any) -> Texts:
        """Returns the texts that images are compared with."""
        return texts

    @abstractmethod
    def compare(self, images: Tensor, texts: Any, options: Any) -> Iterable[Classes | Tensor]:
        """Returns the results of images, given as embeddings (B, E), with the same texts."""

    def name_of(self, source: Source) -> str:
        return str(source[0])


class DualClassifier(DualPredictor):
    """Zero-shot image classification among named classes: the likeliest classes of each; arguments as in Predictor."""

    result = Classes
    returns = "A Classes object"
    fields = ("image", "classes")
    options = LabelOptions

    def sources(
        self, inputs: Sequence[ImageSource], options: LabelOptions
    ) -> list[tuple[ImageSource, tuple[Texts, Texts]]]:
        labels, prompts = as_list(options.label or []), as_list(options.prompt or [PLACE])
        if options.labels is not None:
            labels += read_texts([options.labels], [])
        classes = tuple(dict.fromkeys(filter(str.strip, labels)))  # repeated classes count once
        if not classes:
            raise UserError("--label: missing; name the classes by --label CLASS, repeated, or by --labels FILE")
        check_utf8([*classes, *prompts])
        if wrong := [prompt for prompt in prompts if PLACE not in prompt]:
            raise UserError(f"--prompt {wrong[0]}: must contain {PLACE} as a placeholder for the class")
        return [(image, (classes, tuple(prompts))) for image in inputs]

    def compare(self, images: Tensor, texts: tuple[Texts, Texts], options: LabelOptions) -> Iterator[Classes]:
        classes, prompts = texts
        embeddings = self.embed_cached(self.expand_texts(texts)).unflatten(0, (len(classes), len(prompts)))
        # A class is the mean over the prompts (Radford et al. 2021, section 3.1.4).
        likelihoods = self.model.likelihoods(images, F.normalize(embeddings.mean(1), dim=-1))
        return rank_classes(classes, likelihoods.cpu(), top=options.top)

    def expand_texts(self, texts: tuple[Texts, Texts]) -> Texts:
        classes, prompts = texts
        return tuple(prompt.replace(PLACE, name) for name in classes for prompt in prompts)

    def record(self, source: Source, result: Classes, options: LabelOptions, *, form: str = "jsonl") -> Rows:
        return [classes_record(form, {"image": self.name_of(source)}, result)]


class ImageRetriever(DualPredictor):
    """Ranks images by their similarity to texts: the most similar images of each text; arguments as in Predictor."""

    returns = "A list with the (image, similarity) pairs of each text, the most similar first."
    fields = ("text", "image", "similarity")
    options = RetrievalOptions

    def sources(self, inputs: Sequence[ImageSource], options: RetrievalOptions) -> list[tuple[ImageSource, Texts]]:
        texts = tuple(as_list(options.text))
        if not all(map(str.strip, texts)):
            raise UserError("--text: is empty; give a text that images are ranked by")
        check_utf8(texts)
        return [(image, texts) for image in inputs]

    def compare(self, images: Tensor, texts: Texts, options: RetrievalOptions) -> Iterable[Tensor]:
        return (images @ self.embed_cached(texts).T).cpu()

    def order_results(
        self, results: Iterable[tuple[tuple[ImageSource, Texts], Tensor]], options: RetrievalOptions
    ) -> Iterator[tuple[str, list[tuple[ImageSource, float]]]]:
        """Yields texts with the images that are most similar to each."""
        sources, similarities = zip(*results, strict=True) if (results := list(results)) else ((), ())
        for number, text in enumerate(sources[0][1] if sources else ()):
            column = torch.stack([row[number] for row in similarities])  # (images,)
            values, places = column.topk(min(options.top, len(sources)))
            best = [sources[place][0] for place in places.tolist()]
            yield text, list(zip(best, values.tolist(), strict=True))

    def record(
        self, source: str, result: list[tuple[ImageSource, float]], options: RetrievalOptions, *, form: str = "jsonl"
    ) -> Rows:
        return [{"text": source, "image": str(image), "similarity": round(value, 4)} for image, value in result]


WEIGHT = 2.5  # w in CLIP-S(c, v) = w * max(cos(c, v), 0)
PROMPT = "A photo depicts "  # before each caption
BATCH = 32


def clip_scores(folder: str, captions: Mapping[str, str], files: Mapping[str, Path]) -> dict[str, float]:
    """Returns the CLIPScore of each image: 2.5 * max(cos(caption, image), 0).

    Args:
        folder: Local Hugging Face folder of a CLIPModel.
        captions: Caption by image.
        files: Image file by image.
    Raises:
        UserError: The folder is damaged or holds another model, or an image cannot be read.
    """
    predictor = ImageRetriever(folder)
    scores: dict[str, float] = {}
    names = list(captions)
    for part in (names[start : start + BATCH] for start in range(0, len(names), BATCH)):
        images = predictor.embed_images([predictor.pixels(open_image(files[name])) for name in part])
        texts = predictor.embed_texts([PROMPT + captions[name] for name in part])
        values = WEIGHT * (images * texts).sum(-1).clamp(min=0)  # (B,)
        scores |= dict(zip(part, values.tolist(), strict=True))
    return scores
