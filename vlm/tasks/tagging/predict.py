"""Tagging the words of texts with a trained model: load, split, tag, format; the command `tag`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from vlm.data.batch import InputRows
from vlm.data.text.inputs import encode_words
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.data.text.words import split_words
from vlm.errors import Count
from vlm.inference.info import tokenizer_line
from vlm.inference.options import ModelOptions, Option, Texts, refuse_undecoded
from vlm.inference.predictor import Predictor, check_outputs
from vlm.inference.text.text_rows import read_texts, rows_of
from vlm.io.output import Output, Records
from vlm.models.text_classifiers import TokenClassifier

ROWS = 128  # of a long text that are read at a time, at least


@torch.inference_mode()
def tag_probabilities(model: TokenClassifier, rows: InputRows) -> Tensor:
    """Probabilities of the tags of all words; validation, evaluation and `vlm tag` all go through here: (T, C)."""
    return model(rows.tokens, rows.segments, rows.types, rows.places).double().softmax(-1)


class Tagged(NamedTuple):
    """A word with its likeliest tag, and the probability of that."""

    word: str
    tag: str
    probability: float


class Tagger(Predictor):
    """A trained tagger, ready to use; arguments as in Predictor."""

    task = "tagging"
    fields = ("tagged",)
    model: TokenClassifier

    def restore(self, about: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer_from_state(about["tokenizer"])
        self.max_len = int(about["max_len"])
        self.classes = ["".join(name) for name in about["classes"]]

    def check(self) -> None:
        check_outputs(self.probabilities([["a"]]), len(self.classes), "classes")
        check_outputs(self.model.encoder.token_embed.weight.T, self.tokenizer.vocab_size, "tokens")

    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        refuse_undecoded(inputs)
        return tag_texts(self, list(map(split_words, inputs)), records, batch_size=batch_size)

    def use(self, inputs: Sequence[str], *, words: bool = False, batch_size: Count = 32) -> list[list[Tagged]]:
        """The words of each text with their tags.

        Args:
            inputs: Texts.
            words: Whether words are parted by spaces already; by default punctuation and n't are.
            batch_size: Texts at a time.
        """
        refuse_undecoded(inputs)
        sentences = [line.split() if words else split_words(line) for line in inputs]
        starts = range(0, len(sentences), batch_size)
        tagged = [tags for start in starts for tags in self.tag(sentences[start : start + batch_size])]
        return [
            [Tagged(word, *tag) for word, tag in zip(*both, strict=True)]
            for both in zip(sentences, tagged, strict=True)
        ]

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield tokenizer_line(about["tokenizer"])
        yield f"tags        {', '.join(about['classes'])}"

    def probabilities(self, sentences: Sequence[Sequence[str]]) -> Tensor:
        """Probabilities (T, C) of the tags of all words of some sentences."""
        rows = [row for words in sentences for row in encode_words(self.tokenizer, self.max_len, words)]
        size = max(len(sentences), ROWS)
        parts = (
            rows_of([rows[at : at + size]], self.tokenizer.pad_id, self.device) for at in range(0, len(rows), size)
        )
        return torch.cat([tag_probabilities(self.model, part).cpu() for part in parts])

    def tag(self, sentences: Sequence[Sequence[str]]) -> list[list[tuple[str, float]]]:
        """The likeliest tag of each word of some sentences, with its probability."""
        if not any(sentences):
            return [[] for _ in sentences]
        values, places = self.probabilities(sentences).max(-1)
        tags = [(self.classes[at], value) for at, value in zip(places.tolist(), values.tolist(), strict=True)]
        ends = accumulate(map(len, sentences), initial=0)
        return [tags[start:stop] for start, stop in pairwise(ends)]


def tag_texts(tagger: Tagger, sentences: Sequence[Sequence[str]], records: Records, *, batch_size: int) -> int:
    """Tags sentences in batches and writes a record for each; returns the exit status."""
    tagger.prepack(batch_size)
    for start in range(0, len(sentences), batch_size):
        batch = sentences[start : start + batch_size]
        for words, tagged in zip(batch, tagger.tag(batch), strict=True):
            records.write(_record(records.form, words, tagged))
    return 0


def _record(form: str, words: Sequence[str], tagged: Sequence[tuple[str, float]]) -> dict[str, Any]:
    tags = [tag for tag, _ in tagged]
    if form == "jsonl":
        return {"words": list(words), "tags": tags, "probabilities": [value for _, value in tagged]}
    if form == "csv":
        return {"words": " ".join(words), "tags": " ".join(tags)}
    return {"tagged": " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))}


def command(
    model: ModelOptions,
    text: Texts = None,
    words: Annotated[bool, Option("Words are parted by spaces already; by default punctuation and n't are.")] = False,
) -> int:
    """Tags texts as the options say; returns the exit status."""
    lines = read_texts([], text or [])
    output = Output(model.out, inputs=[model.checkpoint])
    records = Records(form=model.form, fields=Tagger.fields, output=output)
    tagger = model.load(Tagger)
    sentences = [line.split() if words else split_words(line) for line in lines]
    with output:
        return tag_texts(tagger, sentences, records, batch_size=model.batch_size)
