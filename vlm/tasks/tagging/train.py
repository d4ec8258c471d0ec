"""Tagging: the model assigns a tag to each word of a text."""

import shlex
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Unpack

import torch.nn.functional as F

from vlm.data.batch import IGNORE, Batch
from vlm.data.text.inputs import TagField
from vlm.errors import Range, print_error
from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.evaluation.report.content import Confusion, Section, Table, pick_samples
from vlm.models.classifier import TokenClassifier
from vlm.tasks.shared.text_tasks import TextTask, tag_controls
from vlm.tasks.tagging.metrics import Sentence, TaggingMetric, scheme_note
from vlm.tasks.tagging.predict import tag_probabilities
from vlm.training.data_module import Data
from vlm.training.step.losses import Term, check_dropout, class_loss, consistent_class_terms
from vlm.training.step.task import TaskOptions
from vlm.untrusted.sizes import JsonValue


class Tagging(TextTask):
    """Trains by the cross-entropy of each word's tag, read at its first piece.

    Args:
        model, options: As in Task; the model is a TokenClassifier.
        fields: words, and tags.
        consistency: Factor of the divergence of two passes with other dropout (R-Drop, Liang et al. 2021); 0 for none.
    """

    name = "tagging"
    headlines = ("word_accuracy", "span_f1")
    curves = ("word_accuracy", "span_f1")
    text_field = unit = counted_unit = "words"
    model: TokenClassifier

    def __init__(
        self,
        *,
        model: TokenClassifier,
        consistency: Annotated[float, Range(0)] = 0.0,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, **options)
        self.consistency = consistency
        if consistency:
            check_dropout(model)
        tags: TagField = options["fields"]["tags"]
        self.classes = list(tags.classes)
        self.metric = TaggingMetric(classes=self.classes)

    def size(self, batch: Batch) -> int:
        return sum(batch["words"].counts)

    def loss(self, batch: Batch) -> dict[str, Term]:
        rows, tags, smoothing = batch["words"], batch["tags"], self.label_smoothing
        inputs = (rows.tokens, rows.segments, rows.types, rows.places)
        logits = self.model(*inputs)
        if self.consistency:
            options = {"weight": self.consistency, "label_smoothing": smoothing}
            return consistent_class_terms("words", (logits, self.model(*inputs)), tags.labels, tags.count, **options)
        return {"words": Term(class_loss(logits, tags.labels, label_smoothing=smoothing)[0], tags.count)}

    def counts(self, batch: Batch) -> dict[str, int] | None:
        count = batch["tags"].count
        return {"words": count, "consistency": count} if self.consistency else None

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        rows, tags = batch["words"], batch["tags"]
        probabilities = tag_probabilities(self.model, rows)
        loss = F.nll_loss(probabilities.log(), tags.labels, reduction="sum", ignore_index=IGNORE)
        self.evaluation.add_loss({"words": Term(loss, tags.count)})
        names = [self.classes[at] for at in probabilities.argmax(-1).tolist()]
        predicted = [names[start:stop] for start, stop in pairwise(accumulate(rows.counts, initial=0))]
        self.metric.update(batch.ids, list(map(Sentence, rows.texts, tags.tags, predicted)))

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = self.metric.compute()
        self.show([sentence._asdict() for sentence in self.metric.samples.values()], lambda row: _line(Sentence(**row)))
        if final:
            if (note := scheme_note(self.classes)) and self.trainer.is_global_zero:
                print_error(note, "note")
            train = self.data.split("train").records()
            results |= self.metric.intervals(seed=self.seed)
            results |= tag_controls(self.metric, ((record["words"], record["tags"]) for record in train))
        return results

    @property
    def verdict_metrics(self) -> Sequence[str]:
        return "span_f1", "word_accuracy"

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        return self.metric.scorers(metric, control)

    def predictions(self) -> list[dict[str, JsonValue]]:
        return self.metric.rows_of()

    def details(self) -> dict[str, JsonValue]:
        matrix, classes = self.metric.confusion()
        return {"tags": self.metric.per_class(), "confusion": matrix, "classes": classes}

    def report(self) -> list[Section]:
        """The confusion matrix, the scores of each tag and kind of span, and some sentences with mistakes."""
        names = ("precision", "recall", "f1")
        rows = []
        for tag, row in self.metric.per_class().items():
            rows.append([tag, *(f"{row[name]:.1%}" for name in names), f"{row['count']:,.0f}"])
        sentences = self.metric.samples.values()
        wrong = [sentence for sentence in sentences if list(sentence.tags) != list(sentence.predicted)]
        lines = [[_line(sentence)] for sentence in pick_samples(wrong)]
        mistakes = [Section("Sentences with mistakes", [Table(["word/predicted, true"], lines)])] if lines else []
        table = Table(["tag", "precision", "recall", "F1", "number"], rows)
        return [Section("Tags", [Confusion(*self.metric.confusion()), table]), *mistakes]

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        return [*super().reading(batch, tokens), f"  tags      {' '.join(batch['tags'].tags[0][:tokens])}"]

    def example(self, data: Data, folder: Path) -> str:
        return f"vlm tag --text {shlex.quote(' '.join(data.split(data.final_split).record(0)['words']))}"


def _line(sentence: Sentence) -> str:
    """Returns a sentence with its predicted tags, each followed by the true one if it is wrong."""
    words = []
    for word, predicted, true in zip(sentence.words, sentence.predicted, sentence.tags, strict=True):
        words.append(f"{word}/{predicted}" + ("" if predicted == true else f" (true: {true})"))
    return " ".join(words)
