"""Masked language modelling: predicts masked words of a text."""

import shlex
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Unpack

from vlm.data.batch import Batch, MaskedRows
from vlm.errors import Count, printable
from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.evaluation.report.sections import Section, Table, random_places
from vlm.inference.command_options import GAP
from vlm.models.masked_language_model import MaskedLanguageModel
from vlm.nn.vocabulary_loss import vocabulary_loss
from vlm.tasks.masked_language_modeling.metrics import Filled, MaskedMetric
from vlm.tasks.masked_language_modeling.predict import gap_probabilities, pseudo_log_likelihood
from vlm.tasks.shared.text_task import TextTask
from vlm.training.data_module import Data
from vlm.training.step.losses import Term
from vlm.training.step.task import TaskOptions


class MaskedLanguageModeling(TextTask):
    """Trains by the cross-entropy of the masked tokens (Devlin et al. 2019).

    Args:
        model, options: As in Task; the model is a MaskedLanguageModel.
        fields: texts.
        scored_texts: Number of test texts whose pseudo-perplexity is measured, which takes a row per token.
    """

    name = "masked_language_modeling"
    headlines = ("accuracy", "pseudo_perplexity")
    curves = ("accuracy",)
    model: MaskedLanguageModel

    def __init__(
        self, *, model: MaskedLanguageModel, scored_texts: Count = 256, **options: Unpack[TaskOptions]
    ) -> None:
        super().__init__(model=model, **options)
        self.scored_texts, self.metric = scored_texts, MaskedMetric()

    def loss(self, batch: Batch) -> dict[str, Term]:
        rows, head = batch["texts"], self.model.head
        hidden = head.transformed(self.model(rows.tokens, rows.segments, rows.types, rows.places))
        options = {"label_smoothing": self.label_smoothing}
        loss = vocabulary_loss(hidden, rows.labels, head.weight, head.bias, **options)
        return {"tokens": Term(loss, len(rows.labels))}

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        self._scored = 0

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        rows: MaskedRows = batch["texts"]
        chances = gap_probabilities(self.model, rows)
        loss = -chances.gather(1, rows.labels[:, None]).log().sum()
        self.evaluation.add_loss({"tokens": Term(loss, len(rows.labels))})
        piece = self.field.tokenizer.piece
        true, predicted = ([piece(id) for id in ids.tolist()] for ids in (rows.labels, chances.argmax(-1)))
        texts = []
        for number, (start, stop) in enumerate(pairwise(accumulate(rows.counts, initial=0))):
            (text,), gaps = rows.texts[number], rows.gaps[number]
            likelihood, tokens = self._likelihood(text) if final else (None, 0)
            texts.append(Filled(text, gaps, true[start:stop], predicted[start:stop], likelihood, tokens))
        self.metric.update(batch.ids, texts)

    def _likelihood(self, text: str) -> tuple[float | None, int]:
        """Returns the pseudo-log-likelihood of a text, truncated to the model's length, and its number of tokens."""
        self._scored += 1
        if self._scored * self.trainer.world_size > self.scored_texts:
            return None, 0
        tokenizer = self.field.tokenizer
        ids = tokenizer.encode(text)[: self.field.max_len - 2]
        whole, mask_id = [tokenizer.bos_id, *ids, tokenizer.eos_id], tokenizer.mask_id
        assert mask_id is not None
        return pseudo_log_likelihood(self.model, whole, mask_id=mask_id, device=self.device), len(ids)

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = self.metric.compute()
        self.show(self.metric.rows_of(), _line)
        if final:
            results |= self.metric.intervals(seed=self.seed) | self.metric.constant()
            results |= self.metric.ceiling(self.data.source.chances)
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int] | None:
        return self.metric.scorers() if (metric, control) == ("accuracy", "constant") else None

    def predictions(self) -> list[dict[str, Any]]:
        names = ("id", "text", "gaps", "true", "predicted")
        return [{name: row[name] for name in names} for row in self.metric.rows_of()]

    def report(self) -> list[Section]:
        rows = self.metric.rows_of()
        return [Section("Random texts", [Table(["text"], [[_line(rows[at])] for at in random_places(len(rows))])])]

    def example(self, data: Data, folder: Path) -> str:
        first, *rest = data.split(data.final_split).record(0)["text"].split()[:12]
        return f"vlm fill {shlex.quote(' '.join([first, GAP, *rest[1:]]))}"


def _line(row: Mapping[str, Any]) -> str:
    """Returns a text with its predicted tokens, each followed by the true one if it is wrong."""
    pairs = zip(row["predicted"], row["true"], strict=True)
    filled = ", ".join(one if one == true else f"{one} (true: {true})" for one, true in pairs)
    return f"{printable(row['text'][:200])}   filled: {filled}"
