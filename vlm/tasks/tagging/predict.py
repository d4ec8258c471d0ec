"""Tagging the words of texts with a trained model."""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vlm.data.batch import InputRows
from vlm.data.text.inputs import encode_words
from vlm.data.text.words import split_words
from vlm.inference.arguments import TextArguments
from vlm.inference.command_options import TaggingOptions
from vlm.inference.predictor import Rows, Stored, TextPredictor
from vlm.models.classifier import TokenClassifier
from vlm.tasks.classification.predict import ClassPredictor

ROWS = 128  # rows of a batch, or as many as there are texts; a long text has several rows


@torch.inference_mode()
def tag_probabilities(model: TokenClassifier, rows: InputRows) -> Tensor:
    """Returns tag probabilities of all words, for validation, test and `vlm tag`: (T, C)."""
    return model(rows.tokens, rows.segments, rows.types, rows.places).double().softmax(-1)


class TaggedWord(NamedTuple):
    """A word with its likeliest tag.

    Args:
        word: The word.
        tag: Its likeliest tag.
        probability: The probability of the tag.
    """

    word: str
    tag: str
    probability: float


class Tagger(ClassPredictor[str, list[str], list[TaggedWord], TaggingOptions], TextPredictor):
    """A trained tagger, ready to use: the words of each text with their tags; arguments as in Predictor."""

    result = TaggedWord
    returns = "A list with a TaggedWord for each word"
    task = "tagging"
    fields = ("tagged",)
    options = TaggingOptions
    arguments = TextArguments
    stored: ClassVar[Stored] = {"max_len": int}
    max_len: int
    class_heading = "tags"
    model: TokenClassifier

    def check(self) -> None:
        self.check_classes(self.probabilities([["a"]]))
        self.check_vocabulary(self.model.token_table)

    def prepare(self, source: str, options: TaggingOptions) -> list[str]:
        return re.findall(r"\S+", source, re.ASCII) if options.words else split_words(source)

    def predict(self, batch: Sequence[Sequence[str]], options: TaggingOptions) -> list[list[TaggedWord]]:
        if not any(batch):
            return [[] for _ in batch]
        values, places = self.probabilities(batch).max(-1)
        words = [word for sentence in batch for word in sentence]
        tags = (self.classes[at] for at in places.tolist())
        tagged = [TaggedWord(*fields) for fields in zip(words, tags, values.tolist(), strict=True)]
        ends = accumulate(map(len, batch), initial=0)
        return [tagged[start:stop] for start, stop in pairwise(ends)]

    def probabilities(self, sentences: Sequence[Sequence[str]]) -> Tensor:
        """Returns tag probabilities (T, C) of all words of some sentences."""
        rows = [row for words in sentences for row in encode_words(self.tokenizer, self.max_len, words)]
        size = max(len(sentences), ROWS)
        parts = (self.encode_rows([rows[at : at + size]]) for at in range(0, len(rows), size))
        return torch.cat([tag_probabilities(self.model, part).cpu() for part in parts])

    def record(self, source: str, result: list[TaggedWord], options: TaggingOptions, *, form: str = "jsonl") -> Rows:
        words, tags = [word.word for word in result], [word.tag for word in result]
        if form == "text":
            return [{"tagged": " ".join(f"{word.word}/{word.tag}" for word in result)}]
        if form == "csv":
            return [{"words": " ".join(words), "tags": " ".join(tags)}]
        return [{"words": words, "tags": tags, "probabilities": [word.probability for word in result]}]
