"""The metric of translations, exact over any number of processes."""

from collections.abc import Iterable, Sequence
from typing import Any

from vlm.data.records import Split
from vlm.evaluation.metrics.bootstrap import Scorer, column_scorer
from vlm.evaluation.metrics.records import RecordMetric
from vlm.evaluation.metrics.texts import NAMES, TextScores
from vlm.tasks.translation.dictionary import Dictionary, words

PAIRS = 20_000  # training pairs that the dictionary, a control, is learned from
COLUMNS = ("text", "translation", "reference", "loss")  # of a sample


class TranslationMetric(RecordMetric):
    """Scores of all translations of all processes.

    Attributes:
        samples: Samples of the last `compute`, by id.
        scores: Scores of the last `compute`.
        controls: Scores of controls on the same texts.
    """

    samples: dict[str, dict[str, Any]]
    scores: TextScores
    controls: dict[str, TextScores]

    def update(self, rows: Iterable[Sequence[Any]]) -> None:
        """Adds samples: the id and ``COLUMNS``, where loss is the model's loss on the reference."""
        self.add(rows)

    def record(self, ids: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
        """Adds samples and returns them as dicts by column."""
        added = [(id, *row) for id, row in zip(ids, rows, strict=True)]
        self.update(added)
        return [dict(zip(("id", *COLUMNS), row, strict=True)) for row in added]

    def compute(self) -> dict[str, float]:
        """Returns the scores, and ``length_ratio``, the number of words of translations over that of references."""
        self.samples = {id: dict(zip(COLUMNS, row, strict=True)) for id, row in self.rows().items()}
        self.scores, self.controls = TextScores(self._column("translation"), self._column("reference")), {}
        lengths = [sum(len(words(text)) for text in self._column(name)) for name in ("translation", "reference")]
        return self.scores.summary | {"length_ratio": lengths[0] / max(1, lengths[1])}

    def signatures(self) -> dict[str, str]:
        """As in TextScores, of the last `compute`."""
        return self.scores.signatures()

    def intervals(self, *, seed: int) -> dict[str, float]:
        """As in TextScores, of the last `compute`."""
        return self.scores.intervals(seed=seed)

    def dictionary(self, train: Split) -> dict[str, float]:
        """Returns metric@dictionary: the scores of a word-for-word dictionary learned from the training split."""
        dictionary = Dictionary((record["text"], record["translation"]) for record in train.records(PAIRS))
        translations = [dictionary.translate(text) for text in self._column("text")]
        self.controls["dictionary"] = TextScores(translations, self.scores.references)
        return {f"{name}@dictionary": value for name, value in self.controls["dictionary"].summary.items()}

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of a metric of the model and of a control in `controls`, and the number of texts."""
        place = NAMES.index(metric)
        own, other = (column_scorer(scores.score, place) for scores in (self.scores, self.controls[control]))
        return own, other, len(self.samples)

    def _column(self, name: str) -> list[str]:
        return [sample[name] for sample in self.samples.values()]

    def _start(self) -> None:
        super()._start()
        self.samples = {}
