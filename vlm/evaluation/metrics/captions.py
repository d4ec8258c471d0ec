"""Caption metrics of a training or evaluation run, exact over any number of processes."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlm.errors import UserError
from vlm.evaluation.metrics import texts as edits
from vlm.evaluation.metrics.bootstrap import Scorer, caption_intervals, caption_scorer, column_scorer, intervals
from vlm.evaluation.metrics.coco import KEYS, CaptionScores, References
from vlm.evaluation.metrics.records import RecordMetric
from vlm.evaluation.metrics.tokens import WORDS, Units
from vlm.randomness import numpy_rng


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

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
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
        variety = _variety(self.predictions, references, self.units)
        variety["length_ratio"] = variety["mean_length"] / max(1e-9, self._prepared.mean_length)
        return self.scores.summary() | variety | edits.caption_rates(self.predictions, references)

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
        exact = {"exact_match": exact_matches(self.predictions, self.references)}
        bounds = caption_intervals(self.scores, exact, seed=seed)
        if (counts := edits.caption_counts(self.predictions, self.references)) is None:
            return bounds
        return bounds | intervals(
            edits.ERROR_RATES, lambda draws: edits.error_rates(draws @ counts), len(counts), seed=seed
        )

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of one of COCO's metrics of the captions and of a control, and the number of images."""
        assert self.scores is not None, "nothing was computed yet"
        sides = (self.scores, self.get_references().score(self.controls[control]))
        model, baseline = (column_scorer(caption_scorer(scores), KEYS.index(metric)) for scores in sides)
        return model, baseline, len(self.predictions)

    def per_image(self) -> dict[str, dict[str, Any]]:
        """Results of the last `compute` by image: caption, references, scores, and the loss if known."""
        scores = {} if self.scores is None else self.scores.per_image
        return {
            image: {
                "caption": self.predictions[image],
                "references": self.references[image],
                **row,
                **({"loss": self.losses[image]} if image in self.losses else {}),
            }
            for image, row in scores.items()
        }

    def _start(self) -> None:
        super()._start()
        self.predictions, self.references, self.losses = {}, {}, {}
        self.unfinished, self.controls = set(), {}
        self.scores = None


def shuffle_captions(predictions: Mapping[str, str], seed: int) -> dict[str, str]:
    """Assigns each caption to another image, to score captions that ignore their image.

    Args:
        predictions: One caption per image, for at least two images.
        seed: Seed of the order, which does not depend on the order of images.

    Raises:
        UserError: There are fewer than two images.
    """
    images = sorted(predictions)
    if len(images) < 2:
        raise UserError("captions of fewer than two images cannot be shuffled: evaluate more images", status=1)
    cycle = numpy_rng("shuffled captions", seed).permutation(len(images)).tolist()
    takes = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    return {image: predictions[images[takes[place]]] for place, image in enumerate(images)}


def exact_matches(predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> list[bool]:
    """Returns for each image whether its caption equals a reference word for word."""
    return [text.split() in map(str.split, references[image]) for image, text in predictions.items()]


def _variety(predictions: Mapping[str, str], references: Mapping[str, Sequence[str]], units: Units) -> dict[str, float]:
    count = len(predictions)
    exact = sum(exact_matches(predictions, references))
    tokens = [units.cut(text) for text in predictions.values()]
    return {
        "exact_match": exact / count,
        "distinct": len({tuple(text.split()) for text in predictions.values()}) / count,
        "vocabulary": float(len(set().union(*tokens))),
        "mean_length": sum(map(len, tokens)) / count,
    }
