"""Masked language modelling: predicts masked words of a text; its metrics and the best possible scores."""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from vlm.data.batch import Batch, MaskedRows
from vlm.errors import Count, printable
from vlm.evaluation.metrics.bootstrap import Scorer, intervals, ratio_scorer
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import SampleMetric
from vlm.evaluation.report.content import Section, Table, pick_samples
from vlm.inference.arguments import GAP
from vlm.models.text_encoder import MaskedLanguageModel
from vlm.nn.vocabulary_loss import vocabulary_loss
from vlm.tasks.masked_language_modeling.predict import gap_probabilities, pseudo_log_likelihood
from vlm.tasks.shared.text_tasks import TextTask
from vlm.training.data_module import Data
from vlm.training.step.losses import Term
from vlm.training.step.task import TaskOptions
from vlm.untrusted.sizes import JsonValue

Chances = Callable[[Sequence[str | None]], Sequence[Mapping[str, float]] | None]


class MaskedText(NamedTuple):
    """A text of an evaluation.

    Args:
        text: The text.
        gaps: Indices of the masked words.
        true, predicted: The original tokens of the gaps, and the likeliest ones.
        likelihood: Sum of the log-probabilities of its tokens, each masked alone; None if that was not asked for.
        tokens: Number of these tokens.
    """

    text: str
    gaps: Sequence[int]
    true: Sequence[str]
    predicted: Sequence[str]
    likelihood: float | None
    tokens: int


class MaskedMetric(SampleMetric[MaskedText]):
    """Scores over all texts of all processes."""

    kind, unit = MaskedText, "word"
    _constant: str  # the most frequent token of the gaps, once `constant` has counted them

    def compute(self) -> dict[str, float]:
        """Returns accuracy of the tokens in gaps, and pseudo_perplexity per token of the texts with a likelihood.

        Raises:
            UserError: Nothing was added.
        """
        texts = self.gather()
        right, count = self._counts().sum(0)
        scores = {"accuracy": float(right / count)}
        scored = [(text.likelihood, text.tokens) for text in texts if text.likelihood is not None]
        if scored:
            scores["pseudo_perplexity"] = math.exp(-sum(value for value, _ in scored) / sum(n for _, n in scored))
        return scores

    def constant(self) -> dict[str, float]:
        """Returns accuracy@constant, of the most frequent token of the gaps if it were predicted for each."""
        tokens = Counter(token for text in self.samples.values() for token in text.true)
        self._constant, count = max(tokens.items(), key=lambda item: item[1])
        return {"accuracy@constant": count / tokens.total()}

    def scorers(self) -> tuple[Scorer, Scorer, int]:
        """Returns scorers of the accuracy of the model and of `constant`, and the number of texts."""
        hits = [[text.true.count(self._constant), len(text.true)] for text in self.samples.values()]
        model = self._counts()
        return ratio_scorer(model), ratio_scorer(np.array(hits, np.float64)), len(model)

    def ceiling(self, chances: Chances) -> dict[str, float]:
        """Returns the scores of a reader who knows the grammar that generated the texts, a limit for models.

        Args:
            chances: Returns the probability of each word in each gap; None if the grammar is unknown.
        Returns:
            accuracy@ceiling, the expected accuracy of words; loss@ceiling, the loss per word.
        """
        best, losses = [], []
        for text in self.samples.values():
            words = text.text.split()
            of_gaps = chances([None if at in text.gaps else word for at, word in enumerate(words)])
            if of_gaps is None:
                return {}
            best += [max(chance.values(), default=0.0) for chance in of_gaps]
            losses += [-math.log(chance.get(words[at], 1e-9)) for at, chance in zip(text.gaps, of_gaps, strict=True)]
        return {"accuracy@ceiling": sum(best) / len(best), "loss@ceiling": sum(losses) / len(losses)}

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns accuracy@low and accuracy@high: a 95% interval by bootstrap over texts."""
        counts = self._counts()
        return intervals(["accuracy"], ratio_scorer(counts), len(counts), seed=seed)

    def _counts(self) -> Floats:
        """Returns the numbers of right tokens and of gaps of each text. Shapes: -> (N, 2)"""
        pairs = (zip(text.true, text.predicted, strict=True) for text in self.samples.values())
        hits = [[token == prediction for token, prediction in pair] for pair in pairs]
        return np.array([[sum(hit), len(hit)] for hit in hits], np.float64)


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
        hidden = head.apply_transform(self.model(rows.tokens, rows.segments, rows.types, rows.places))
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
            texts.append(MaskedText(text, gaps, true[start:stop], predicted[start:stop], likelihood, tokens))
        self.metric.update(batch.ids, texts)

    def _likelihood(self, text: str) -> tuple[float | None, int]:
        """Returns the pseudo-log-likelihood of a text, truncated to the model's length, and its number of tokens."""
        self._scored += 1
        if self._scored * self.trainer.world_size > self.scored_texts:
            return None, 0
        tokenizer = self.field.tokenizer
        ids = tokenizer.encode(text)[: self.field.max_len - 2]
        all_ids, mask_id = [tokenizer.bos_id, *ids, tokenizer.eos_id], tokenizer.mask_id
        assert mask_id is not None
        return pseudo_log_likelihood(self.model, all_ids, mask_id=mask_id, device=self.device), len(ids)

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = self.metric.compute()
        self.show(self.metric.rows_of(), _line)
        if final:
            results |= self.metric.intervals(seed=self.seed) | self.metric.constant()
            results |= self.metric.ceiling(self.data.source.word_probabilities)
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int] | None:
        return self.metric.scorers() if (metric, control) == ("accuracy", "constant") else None

    def predictions(self) -> list[dict[str, JsonValue]]:
        names = ("id", "text", "gaps", "true", "predicted")
        return [{name: row[name] for name in names} for row in self.metric.rows_of()]

    def report(self) -> list[Section]:
        rows = self.metric.rows_of()
        return [Section("Random texts", [Table(["text"], [[_line(row)] for row in pick_samples(rows)])])]

    def example(self, data: Data, folder: Path) -> str:
        first, *rest = data.split(data.final_split).record(0)["text"].split()[:12]
        return f"vlm fill {shlex.quote(' '.join([first, GAP, *rest[1:]]))}"


def _line(row: Mapping[str, Any]) -> str:
    """Returns a text with its predicted tokens, each followed by the true one if it is wrong."""
    pairs = zip(row["predicted"], row["true"], strict=True)
    filled = ", ".join(token if token == true else f"{token} (true: {true})" for token, true in pairs)
    return f"{printable(row['text'][:200])}   filled: {filled}"
