"""Tagging the words of texts with a trained model."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vlm.data.batch import InputRows
from vlm.data.text.inputs import encode_words
from vlm.data.text.words import split_words
from vlm.inference.command_options import TaggingOptions
from vlm.inference.inputs import TextArguments
from vlm.inference.predictor import BatchPredictor, Rows, TextPredictor, check_outputs
from vlm.models.classifier import TokenClassifier

ROWS = 128  # rows of a batch, or as many as there are texts; a long text has several rows


@torch.inference_mode()
def tag_probabilities(model: TokenClassifier, rows: InputRows) -> Tensor:
    """Returns tag probabilities of all words, for validation, test and `vlm tag`: (T, C)."""
    return model(rows.tokens, rows.segments, rows.types, rows.places).double().softmax(-1)


class Tagged(NamedTuple):
    """A word with its likeliest tag.

    Args:
        word: The word.
        tag: Its likeliest tag.
        probability: The probability of the tag.
    """

    word: str
    tag: str
    probability: float


class Tagger(BatchPredictor, TextPredictor):
    """A trained tagger, ready to use: the words of each text with their tags; arguments as in Predictor."""

    result = Tagged
    returns = "A list with a Tagged for each word"
    task = "tagging"
    fields = ("tagged",)
    options = TaggingOptions
    arguments = TextArguments
    model: TokenClassifier

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.max_len = int(about["max_len"])
        self.classes = ["".join(name) for name in about["classes"]]

    def check(self) -> None:
        check_outputs(self.probabilities([["a"]]), len(self.classes), "classes")
        check_outputs(self.model.encoder.token_embed.weight.T, self.tokenizer.vocab_size, "tokens")

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield from super().describe(about)
        yield f"tags        {', '.join(about['classes'])}"

    def prepare(self, source: str, options: TaggingOptions) -> list[str]:
        return source.split() if options.words else split_words(source)

    def predict(self, batch: Sequence[Sequence[str]], options: TaggingOptions) -> list[list[Tagged]]:
        if not any(batch):
            return [[] for _ in batch]
        values, places = self.probabilities(batch).max(-1)
        words = [word for sentence in batch for word in sentence]
        tags = (self.classes[at] for at in places.tolist())
        tagged = [Tagged(*one) for one in zip(words, tags, values.tolist(), strict=True)]
        ends = accumulate(map(len, batch), initial=0)
        return [tagged[start:stop] for start, stop in pairwise(ends)]

    def probabilities(self, sentences: Sequence[Sequence[str]]) -> Tensor:
        """Returns tag probabilities (T, C) of all words of some sentences."""
        rows = [row for words in sentences for row in encode_words(self.tokenizer, self.max_len, words)]
        size = max(len(sentences), ROWS)
        parts = (self.encoded([rows[at : at + size]]) for at in range(0, len(rows), size))
        return torch.cat([tag_probabilities(self.model, part).cpu() for part in parts])

    def record(self, source: str, result: list[Tagged], options: TaggingOptions, *, form: str = "jsonl") -> Rows:
        words, tags = [one.word for one in result], [one.tag for one in result]
        if form == "text":
            return [{"tagged": " ".join(f"{one.word}/{one.tag}" for one in result)}]
        if form == "csv":
            return [{"words": " ".join(words), "tags": " ".join(tags)}]
        return [{"words": words, "tags": tags, "probabilities": [one.probability for one in result]}]
