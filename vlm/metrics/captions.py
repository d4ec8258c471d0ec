"""Caption metrics of a training or evaluation run, exact over any number of processes."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlm.errors import UserError
from vlm.metrics.coco import CaptionScores, References, best_constant, score_captions
from vlm.metrics.ptb import tokenize
from vlm.metrics.records import RecordMetric
from vlm.randomness import numpy_rng

__all__ = ["CaptionMetric", "CaptionScores", "References", "best_constant", "score_captions", "shuffled"]


class CaptionMetric(RecordMetric):
    """COCO's caption metrics, and how varied the captions are, over all captions of all processes.

    Attributes:
        predictions, references: Of all processes, for whoever wants the texts after the scores.
    """

    predictions: dict[str, str]
    references: dict[str, list[str]]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._prepared: References | None = None

    def update(self, ids: Sequence[str], predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        """Adds the captions of some images.

        Args:
            ids: What names each image throughout the data set.
            predictions: One caption each.
            references: The reference captions of each.
        """
        rows = zip(ids, predictions, references, strict=True)
        self.add((image, text, list(texts)) for image, text, texts in rows)

    def compute(self) -> dict[str, float]:
        """The scores of ``CaptionScores.summary`` and four more.

        ``exact_match`` is the share of captions that equal a reference word for word, ``distinct`` the share that is
        left when repeated ones are struck out, ``vocabulary`` the number of different words, ``mean_length`` that of
        words in a caption (both counted in tokens).

        Raises:
            UserError: Nothing was added.
        """
        rows = self.rows()
        self.predictions = {image: text for image, (text, _) in rows.items()}
        self.references = references = {image: texts for image, (_, texts) in rows.items()}
        # The references of a split are the same every epoch, and to prepare them costs more than to score.
        if self._prepared is None or self._prepared.captions != references:
            self._prepared = References(references)
        return self._prepared.score(self.predictions).summary() | _variety(self.predictions, references)

    def _start(self) -> None:
        super()._start()
        self.predictions, self.references = {}, {}


def shuffled(predictions: Mapping[str, str], seed: int) -> dict[str, str]:
    """The same captions, each given to another image: what is left of a score when captions ignore their image.

    Args:
        predictions: One caption by image, two images or more.
        seed: Chooses the order; the same for the same images, whatever their order.

    Raises:
        UserError: There is no other image to take a caption from.
    """
    images = sorted(predictions)
    if len(images) < 2:
        raise UserError("captions of fewer than two images cannot be shuffled: evaluate more images", status=1)
    cycle = numpy_rng("shuffled captions", seed).permutation(len(images)).tolist()
    takes = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    return {image: predictions[images[takes[place]]] for place, image in enumerate(images)}


def _variety(predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> dict[str, float]:
    count = len(predictions)
    exact = sum(text.split() in map(str.split, references[image]) for image, text in predictions.items())
    tokens = [tokenize(text) for text in predictions.values()]
    return {
        "exact_match": exact / count,
        "distinct": len({tuple(text.split()) for text in predictions.values()}) / count,
        "vocabulary": float(len(set().union(*tokens))),
        "mean_length": sum(map(len, tokens)) / count,
    }
