"""Classifying texts with a trained model: load, encode, predict, format; the command `classify`, for texts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any

import torch
from torch import Tensor

from vlm.data.batch import InputRows
from vlm.data.text.inputs import encode_text
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import Count, UserError, excerpt, print_error
from vlm.inference.info import tokenizer_line
from vlm.inference.options import ModelOptions, Option, Texts, refuse_undecoded
from vlm.inference.predictor import Predictor, check_outputs
from vlm.inference.ranking import Classes, ranked, ranked_record
from vlm.inference.text.text_rows import note_cut, read_texts, rows_of
from vlm.io.output import Output, Records
from vlm.models.text_classifiers import SequenceClassifier


@torch.inference_mode()
def text_probabilities(model: SequenceClassifier, rows: InputRows) -> Tensor:
    """Probabilities of texts; validation, evaluation and `vlm classify` all go through here: (B, C), float64."""
    return model(rows.tokens, rows.segments, rows.types, rows.layout).double().softmax(-1)


class TextClassifier(Predictor):
    """A trained classifier of texts or of pairs of texts, ready to use; arguments as in Predictor."""

    task = "text_classification"
    fields = ("text", "classes")
    model: SequenceClassifier

    def restore(self, about: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer_from_state(about["tokenizer"])
        self.max_len, self.pairs = int(about["max_len"]), None if about["pairs"] is None else bool(about["pairs"])
        self.classes = ["".join(name) for name in about["classes"]]

    def check(self) -> None:
        check_outputs(self.classify([("a", "b") if self.pairs else ("a",)]), len(self.classes), "classes")
        encoder: Any = self.model.encoder
        check_outputs(encoder.token_embed.weight.T, self.tokenizer.vocab_size, "tokens")

    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        refuse_undecoded(inputs)
        return classify_texts(self, self.samples(inputs), records, batch_size=batch_size, top=1)

    def use(
        self, inputs: Sequence[str], *, pair: str | Sequence[str] = (), top: Count = 1, batch_size: Count = 32
    ) -> list[Classes]:
        """The likeliest classes of each text.

        Args:
            inputs: Texts.
            pair: The second text of each, for a model of pairs.
            top: Classes of a text.
            batch_size: Texts at a time.
        """
        refuse_undecoded(inputs)
        samples = self.samples(inputs, [pair] if isinstance(pair, str) else pair)
        if self.pairs and any(len(sample) != 2 for sample in samples):
            raise UserError("pair: this model reads pairs of texts; give each text its pair=TEXT, or TEXT<TAB>TEXT")
        batches = (samples[start : start + batch_size] for start in range(0, len(samples), batch_size))
        return [one for batch in batches for one in ranked(self.classes, self.classify(batch), top=top)]

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield tokenizer_line(about["tokenizer"])
        yield f"classes     {', '.join(about['classes'])}{', of pairs of texts' if about['pairs'] else ''}"

    def samples(self, lines: Sequence[str], pairs: Sequence[str] = ()) -> list[tuple[str, ...]]:
        """The texts of each sample: a line, or the two parts of one at its tab, where no second texts stand apart.

        A model that may read either, as of a folder that does not say, reads pairs where second texts stand apart.

        Raises:
            UserError: A model of single texts is to read pairs.
        """
        if pairs and self.pairs is False:
            raise UserError("--pair: this model reads single texts; leave it out")
        if not pairs and not self.pairs:
            return [(line,) for line in lines]
        if pairs:
            return [tuple(filter(None, pair)) for pair in zip_longest(lines, pairs)]
        return [tuple(line.split("\t")) for line in lines]

    def readable(self, samples: Sequence[Sequence[str]]) -> list[Sequence[str]]:
        """The samples that are as many texts as the model reads.

        The others are named on stderr, where the number of those that are cut stands, too.

        Raises:
            UserError: There are none.
        """
        count = 2 if self.pairs or max(map(len, samples)) > 1 else 1
        remedy = "this model reads pairs of texts; give TEXT<TAB>TEXT, or a --pair to each --text"
        faults = [f"{excerpt(' '.join(sample))}: {remedy}" for sample in samples if len(sample) != count]
        if len(faults) == len(samples):
            raise UserError(faults[0])
        for fault in faults:
            print_error(fault)
        good, encode = [sample for sample in samples if len(sample) == count], self.tokenizer.encode
        note_cut((sum(len(encode(text)) for text in sample) for sample in good), self.max_len - 1 - count)
        return good

    def classify(self, texts: Sequence[Sequence[str]]) -> Tensor:
        """Probabilities (B, C) of texts, or of pairs of them."""
        samples = [[encode_text(self.tokenizer, self.max_len, *sample)] for sample in texts]
        return text_probabilities(self.model, rows_of(samples, self.tokenizer.pad_id, self.device)).cpu()


def classify_texts(
    classifier: TextClassifier, texts: Sequence[Sequence[str]], records: Records, *, batch_size: int, top: int
) -> int:
    """Classifies texts in batches and writes a record for each; returns the exit status.

    A sample that is no pair, where the model reads pairs, does not keep the others from being classified.

    Args:
        top: Classes of a text that are written, the most probable first.
    """
    good = classifier.readable(texts)
    classifier.prepack(batch_size)
    for start in range(0, len(good), batch_size):
        batch = good[start : start + batch_size]
        rankings = ranked(classifier.classes, classifier.classify(batch), top=top)
        for sample, one in zip(batch, rankings, strict=True):
            head = dict(zip(("text", "pair"), sample, strict=False))
            head = {"text": " | ".join(sample)} if records.form == "text" else head
            records.write(ranked_record(records.form, head, one))
    return 1 if len(good) < len(texts) else 0


def command(
    model: ModelOptions,
    text: Texts = None,
    pair: Annotated[list[str] | None, Option("Second text of a pair, one to each --text.")] = None,
    top: Annotated[int, Option("Classes of an input that are written.", least=1)] = 1,
) -> int:
    """Classifies texts as the options say; returns the exit status."""
    lines = read_texts([], text or [])
    refuse_undecoded(pair or ())
    output = Output(model.out, inputs=[model.checkpoint])
    records = Records(form=model.form, fields=TextClassifier.fields, output=output)
    classifier = model.load(TextClassifier)
    with output:
        samples = classifier.samples(lines, pair or ())
        return classify_texts(classifier, samples, records, batch_size=model.batch_size, top=top)
