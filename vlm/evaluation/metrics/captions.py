"""Caption metrics of a training or evaluation run, exact over any number of processes."""

from collections.abc import Mapping, Sequence
from typing import Required, TypedDict

import numpy as np

from vlm.evaluation.metrics.bootstrap import Scorer, caption_scorer, column_scorer, intervals, mean_scorer
from vlm.evaluation.metrics.coco import KEYS, CaptionScores, References
from vlm.evaluation.metrics.records import RecordMetric
from vlm.evaluation.metrics.texts import ERROR_RATES, caption_counts, caption_rates, error_rates
from vlm.evaluation.metrics.tokens import WORDS, Units
from vlm.randomness import numpy_rng


class ScoredCaption(TypedDict, total=False):
    """A caption with its references and scores; `loss` is missing where it is unknown."""

    caption: Required[str]
    references: Required[list[str]]
    bleu1: float
    bleu2: float
    bleu3: float
    bleu4: float
    rouge_l: float
    cider: float
    loss: float


class CaptionMetric(RecordMetric):
    """COCO's caption metrics and diversity, over all captions of all processes.

    Attributes:
        predictions, references: Texts of all processes, after `compute`.
        losses: Losses of images, if given.
        unfinished: Images whose caption has the maximum length.
        scores: Result of the last `compute`.
        controls: Captions of controls for the same images.
    """

    predictions: dict[str, str]
    references: dict[str, list[str]]
    losses: dict[str, float]
    unfinished: set[str]
    scores: CaptionScores | None
    controls: dict[str, dict[str, str]]

    def __init__(self) -> None:
        super().__init__()
        self._prepared: References | None = None

    def update(
        self,
        ids: Sequence[str],
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        losses: Sequence[float] | None = None,
        unfinished: Sequence[bool] | None = None,
    ) -> None:
        """Adds the captions of some images.

        Args:
            ids: Unique id of each image.
            predictions: One caption per image.
            references: The reference captions of each image.
            losses: The model's loss per image, optional.
            unfinished: Whether each prediction has the maximum length, optional.
        """
        row_losses: Sequence[float | None] = [None] * len(ids) if losses is None else losses
        flags = [False] * len(ids) if unfinished is None else unfinished
        rows = zip(ids, predictions, references, row_losses, flags, strict=True)
        self.add((image, text, list(texts), loss, flag) for image, text, texts, loss, flag in rows)

    def compute(self) -> dict[str, float]:
        """Returns ``CaptionScores.summary`` and further scores.

        ``exact_match`` is the share of captions that equal a reference word for word, ``distinct`` the share of
        different captions, ``vocabulary`` the number of different words, ``mean_length`` the mean number of words per
        caption (both counted in `units`), and ``length_ratio`` the mean length divided by that of the references: if it
        drifts from 1, captions stop too early or do not end. If each image has one reference, such as an image of a
        text line, ``cer`` and ``wer`` are the error rates of characters and words.

        Raises:
            UserError: There are no captions.
        """
        rows = self.rows()
        self.predictions = {image: text for image, (text, *_) in rows.items()}
        self.references = references = {image: texts for image, (_, texts, *_) in rows.items()}
        self.losses = {image: loss for image, (*_, loss, _) in rows.items() if loss is not None}
        self.unfinished = {image for image, (*_, flag) in rows.items() if flag}
        # References of a split are the same every epoch, and preparing them takes longer than scoring.
        if self._prepared is None or self._prepared.captions != references:
            self._prepared = References(references)
        self.scores = self._prepared.score(self.predictions)
        count, cut = len(self.predictions), self.units.cut
        tokens = [cut(text) for text in self.predictions.values()]
        mean_length = sum(map(len, tokens)) / count
        variety = {
            "exact_match": sum(exact_matches(self.predictions, references)) / count,
            "distinct": len({tuple(text.split()) for text in self.predictions.values()}) / count,
            "vocabulary": float(len(set().union(*tokens))),
            "mean_length": mean_length,
            "length_ratio": mean_length / max(1e-9, self._prepared.mean_length),
        }
        return self.scores.summary() | variety | caption_rates(self.predictions, references)

    @property
    def units(self) -> Units:
        """Units of the last `compute`."""
        return WORDS if self._prepared is None else self._prepared.units

    def get_references(self) -> References:
        """References of the last `compute`, for scoring other captions of the same images."""
        assert self._prepared is not None, "nothing was computed yet"
        return self._prepared

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns metric@low and metric@high: 95% intervals of the last `compute`, by bootstrap over images."""
        assert self.scores is not None, "nothing was computed yet"
        exact, count = np.array(exact_matches(self.predictions, self.references), np.float64), len(self.predictions)
        bounds = intervals(KEYS, caption_scorer(self.scores), count, seed=seed)
        bounds |= intervals(["exact_match"], mean_scorer(exact[:, None]), count, seed=seed)
        if (edits := caption_counts(self.predictions, self.references)) is None:
            return bounds
        return bounds | intervals(ERROR_RATES, lambda draws: error_rates(draws @ edits), count, seed=seed)

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of one of COCO's metrics of the captions and of a control, and the number of images."""
        assert self.scores is not None, "nothing was computed yet"
        sides = (self.scores, self.get_references().score(self.controls[control]))
        model, baseline = (column_scorer(caption_scorer(scores), KEYS.index(metric)) for scores in sides)
        return model, baseline, len(self.predictions)

    def per_image(self) -> dict[str, ScoredCaption]:
        """Results of the last `compute` by image: caption, references, scores, and the loss if known."""
        rows: dict[str, ScoredCaption] = {}
        for image, scores in (self.scores.per_image if self.scores else {}).items():
            rows[image] = {"caption": self.predictions[image], "references": self.references[image], **scores}  # type: ignore[typeddict-item]
            if image in self.losses:
                rows[image]["loss"] = self.losses[image]
        return rows

    def _start(self) -> None:
        super()._start()
        self.predictions, self.references, self.losses = {}, {}, {}
        self.unfinished, self.controls = set(), {}
        self.scores = None


def shuffle_captions(predictions: Mapping[str, str], seed: int) -> dict[str, str]:
    """Assigns each caption to another image, to score captions that ignore their image; a single one stays.

    Args:
        predictions: One caption per image.
        seed: Seed of the order, which does not depend on the order of images.
    """
    images = sorted(predictions)
    cycle = numpy_rng("shuffled captions", seed).permutation(len(images)).tolist()
    takes = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    return {image: predictions[images[takes[place]]] for place, image in enumerate(images)}


def exact_matches(predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> list[bool]:
    """Returns for each image whether its caption equals a reference word for word."""
    return [text.split() in map(str.split, references[image]) for image, text in predictions.items()]
