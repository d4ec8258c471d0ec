"""Comparing images with texts by a trained dual encoder: zero-shot `classify`, and `retrieve`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.data.batch import InputRows
from vlm.data.images.image import Preprocess
from vlm.data.text.inputs import encode_text
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import Count, UserError
from vlm.inference.info import preprocess_line, tokenizer_line
from vlm.inference.inputs import find_images, read_images
from vlm.inference.options import Images, ModelOptions, Option, Workers, choose_workers, refuse_undecoded
from vlm.inference.predictor import check_outputs, normalized
from vlm.inference.ranking import Classes
from vlm.inference.text.text_rows import read_texts, rows_of
from vlm.io.output import Output, Records
from vlm.models.dual_encoder import DualEncoder
from vlm.nn.step.packed import prepack
from vlm.tasks.classification.predict import ImageClassifier, classify_files

COMMAND_RETRIEVE = {
    "name": "retrieve",
    "help": "Rank images by a text: one line each, TEXT<TAB>PATH<TAB>SIMILARITY.",
    "function": "retrieve",
}
PLACE = "{}"  # of a class in a prompt
ROWS = 256  # texts that are embedded at a time


@torch.inference_mode()
def embed_pixels(model: DualEncoder, preprocess: Preprocess, pixels: Tensor) -> Tensor:
    """Embeddings of preprocessed images; evaluation and commands go through here: uint8 (B, 3, H, W) -> (B, E)."""
    with torch.autocast(pixels.device.type, enabled=False):
        return model.embed_images(normalized(model, preprocess, pixels))


@torch.inference_mode()
def embed_rows(model: DualEncoder, rows: InputRows) -> Tensor:
    """Embeddings of texts; evaluation and commands go through here: (T, E)."""
    assert rows.places is not None
    with torch.autocast(rows.tokens.device.type, enabled=False):
        return model.embed_texts(rows.tokens, rows.segments, rows.places)


class DualClassifier(ImageClassifier):
    """A trained dual encoder, ready to use; arguments as in Predictor. It classifies once `name_classes` was called."""

    task = "contrastive"
    model: DualEncoder

    def restore(self, about: Mapping[str, Any]) -> None:
        self.preprocess = Preprocess.from_state(about["preprocess"])
        self.tokenizer = tokenizer_from_state(about["tokenizer"])

    def check(self) -> None:
        check_outputs(self.model.text_encoder.token_embed.weight.T, self.tokenizer.vocab_size, "tokens")
        self.name_classes(["a", "b"])
        super().check()

    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        raise UserError("vlm predict: this model needs the names of classes; use vlm classify IMAGES --label CLASS")

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield tokenizer_line(about["tokenizer"])
        yield preprocess_line(about["preprocess"])

    def name_classes(self, classes: Sequence[str], prompts: Sequence[str] = (PLACE,)) -> None:
        """Sets the classes that images are of; one that is named again counts once.

        Args:
            prompts: Texts with a place for a class; the mean of their embeddings is taken (Radford et al. 2021, 3.1.4).
        Raises:
            UserError: A prompt has no place for a class.
        """
        if wrong := [prompt for prompt in prompts if PLACE not in prompt]:
            raise UserError(f"--prompt {wrong[0]}: has no {PLACE}; put it where the class is to stand")
        self.classes = list(dict.fromkeys(classes))
        texts = [prompt.replace(PLACE, name) for name in self.classes for prompt in prompts]
        means = self.embed_texts(texts).unflatten(0, (len(self.classes), len(prompts))).mean(1)  # (C, E)
        self.heads = F.normalize(means, dim=-1)

    def use(
        self,
        inputs: Sequence[Any],
        *,
        label: Sequence[str] = (),
        prompt: Sequence[str] = (PLACE,),
        top: Count = 1,
        batch_size: Count = 32,
        workers: Workers = None,
    ) -> list[Classes]:
        """The likeliest classes of each image, of those that are named.

        Args:
            inputs: Paths, images of Pillow, or arrays (H, W, 3).
            label: Names of the classes.
            prompt: Texts around a class, such as ["a photo of a {}"].
            top: Classes of an image.
            batch_size: Images at a time.
            workers: Threads that read images ahead; by default one a CPU, up to 8.
        """
        if not label or isinstance(label, str):
            raise UserError("label: missing; give label=[CLASS, CLASS, ...]")
        self.name_classes(label, [prompt] if isinstance(prompt, str) else prompt)
        return super().use(inputs, top=top, batch_size=batch_size, workers=workers)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Embeddings (T, E) of texts, as far as the model reads them."""
        max_len = self.model.text_encoder.max_len
        rows = [[encode_text(self.tokenizer, max_len, text)._replace(places=[0])] for text in texts]
        parts = (rows[start : start + ROWS] for start in range(0, len(rows), ROWS))
        embeddings = [embed_rows(self.model, rows_of(part, self.tokenizer.pad_id, self.device)) for part in parts]
        return torch.cat(embeddings)

    def embed_images(self, pixels: Sequence[Tensor]) -> Tensor:
        """Embeddings (B, E) of a batch of images that `pixels` made."""
        return embed_pixels(self.model, self.preprocess, torch.stack(list(pixels)).to(self.device))

    def classify(self, pixels: Sequence[Tensor]) -> Tensor:
        scale = self.model.scale.detach().float()
        return (scale * self.embed_images(pixels) @ self.heads.T).double().softmax(-1).cpu()


def retrieve_files(
    encoder: DualClassifier,
    paths: Sequence[str],
    texts: Sequence[str],
    records: Records,
    *,
    batch_size: int,
    top: int,
    workers: int = 0,
) -> int:
    """Writes the images that are most similar to each text, the most similar first; returns the exit status.

    Args:
        top: Images of a text that are written.
        workers: As in `read_images`.
    """
    queries = encoder.embed_texts(texts)
    prepack(encoder.model)
    names: list[str] = []
    parts: list[Tensor] = []
    for good, pixels, _ in read_images(paths, encoder.pixels, batch_size=batch_size, workers=workers):
        names += good
        parts += [encoder.embed_images(pixels) @ queries.T] if good else []  # (B, T)
    for text, column in zip(texts, torch.cat(parts).T if parts else [], strict=False):
        values, places = column.topk(min(top, len(names)))
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            records.write({"text": text, "image": names[place], "similarity": round(value, 4)})
    return 1 if len(names) < len(paths) else 0


def command(
    images: Images,
    model: ModelOptions,
    label: Annotated[list[str] | None, Option("A class of a model that was trained on captions; repeat it.")] = None,
    labels: Annotated[str | None, Option("Such classes, a line each.", metavar="FILE")] = None,
    prompt: Annotated[list[str] | None, Option(f"Text around such a class: 'a photo of a {PLACE}'.")] = None,
    top: Annotated[int, Option("Classes of an input that are written.", least=1)] = 1,
    workers: Workers = None,
) -> int:
    """Classifies images among the classes of the options; returns the exit status."""
    refuse_undecoded(prompt or ())
    classes = [*filter(str.strip, read_texts([labels] if labels else [], label or []))] if label or labels else []
    if not classes:
        raise UserError("--label: missing; name the classes by --label CLASS --label CLASS ..., or by --labels FILE")
    paths = find_images(images)
    output = Output(model.out, inputs=[*paths, model.checkpoint, *([labels] if labels else [])])
    records = Records(form=model.form, fields=DualClassifier.fields, output=output)
    classifier = model.load(DualClassifier)
    classifier.name_classes(classes, prompt or [PLACE])
    options: Any = {"batch_size": model.batch_size, "top": top, "workers": choose_workers(workers)}
    with output:
        return classify_files(classifier, paths, records, **options)


def retrieve(
    images: Images,
    model: ModelOptions,
    text: Annotated[list[str], Option("Text that images are ranked by; may be repeated.")],
    top: Annotated[int, Option("Images of a text that are written.", least=1)] = 10,
    workers: Workers = None,
) -> int:
    """Ranks images by texts as the options say; returns the exit status."""
    refuse_undecoded(text)
    paths = find_images(images)
    output = Output(model.out, inputs=[*paths, model.checkpoint])
    records = Records(form=model.form, fields=("text", "image", "similarity"), output=output)
    encoder = model.load(DualClassifier)
    options: Any = {"batch_size": model.batch_size, "top": top, "workers": choose_workers(workers)}
    with output:
        return retrieve_files(encoder, paths, text, records, **options)
