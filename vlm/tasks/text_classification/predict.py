"""Classifying texts, or pairs of texts, with a trained model."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlm.checkpoint.stored import Metadata
from vlm.data.batch import InputRows
from vlm.data.text.inputs import encode_text
from vlm.errors import UserError, excerpt
from vlm.inference.arguments import TextArguments, check_utf8
from vlm.inference.command_options import TextClassOptions
from vlm.inference.options import as_list
from vlm.inference.predictor import Rows, Stored, TextPredictor, note_truncation
from vlm.models.classifier import SequenceClassifier
from vlm.tasks.classification.predict import Classes, ClassPredictor, classes_record, rank_classes

Sample = tuple[str | None, ...]  # the texts of a sample; None for a missing one


@torch.inference_mode()
def text_probabilities(model: SequenceClassifier, rows: InputRows) -> Tensor:
    """Returns class probabilities of texts, for validation, test and `vlm classify`: (B, C), float64."""
    return model(rows.tokens, rows.segments, rows.types, rows.layout).double().softmax(-1)


class TextClassifier(ClassPredictor[Sample, Sequence[str], Classes, TextClassOptions], TextPredictor):
    """A trained classifier of texts or of pairs of texts: the likeliest classes of each; arguments as in Predictor."""

    task = "text_classification"
    result = Classes
    returns = "A Classes object"
    fields = ("text", "classes")
    options = TextClassOptions
    arguments = TextArguments
    stored: ClassVar[Stored] = {"max_len": int, "pairs": lambda pairs: None if pairs is None else bool(pairs)}
    max_len: int
    pairs: bool | None
    model: SequenceClassifier

    def check(self) -> None:
        self.check_classes(self.probabilities([("a", "b") if self.pairs else ("a",)]))
        encoder: Any = self.model.encoder
        self.check_vocabulary(encoder.token_embed.weight)

    @classmethod
    def describe_classes(cls, about: Metadata) -> str:
        return super().describe_classes(about) + (", of pairs of texts" if about["pairs"] else "")

    def sources(self, inputs: Sequence[str], options: TextClassOptions) -> list[Sample]:
        """Returns the texts of each sample: a line, or its two parts around a tab if no second texts are given.

        If the checkpoint does not state whether the model reads pairs, it does if second texts are given.
        """
        pairs = as_list(options.pair or [])
        check_utf8(pairs)
        if pairs and self.pairs is False:
            raise UserError("--pair: this model reads single texts; leave it out")
        if pairs:
            return list(zip_longest(inputs, pairs))
        if self.pairs:
            return [tuple(line.split("\t")) if "\t" in line else (line, None) for line in inputs]
        return [(line,) for line in inputs]

    def prepare(self, source: Sample, options: TextClassOptions) -> Sequence[str]:
        texts = [text for text in source if text is not None]
        if len(texts) < len(source) or len(source) > 2:
            beginning = excerpt(" ".join(filter(None, source))) or "an empty text"
            remedy = "give TEXT<TAB>TEXT, or a --pair to each --text"
            raise UserError(f"{beginning}: this model reads pairs of texts; {remedy}")
        return texts

    def predict(self, batch: Sequence[Sequence[str]], options: TextClassOptions) -> list[Classes]:
        return list(rank_classes(self.classes, self.probabilities(batch), top=options.top))

    def probabilities(self, texts: Sequence[Sequence[str]]) -> Tensor:
        """Returns class probabilities (B, C) of texts, or of pairs of texts."""
        samples = [[encode_text(self.tokenizer, self.max_len, *sample)] for sample in texts]
        return text_probabilities(self.model, self.encode_rows(samples)).cpu()

    def record(self, source: Sample, result: Classes, options: TextClassOptions, *, form: str = "jsonl") -> Rows:
        joined = {"text": " | ".join(text or "" for text in source)}
        named = joined if form == "text" else dict(zip(("text", "pair"), source, strict=False))
        return [classes_record(form, named, result)]

    def notes(self, sources: Sequence[Sample], options: TextClassOptions) -> Iterator[str | UserError]:
        complete = [sample for sample in sources if None not in sample and len(sample) <= 2]
        lengths = [sum(len(self.tokenizer.encode(text)) for text in sample if text) for sample in complete]
        yield from note_truncation(lengths, self.max_len - 1 - max(map(len, complete), default=1))
