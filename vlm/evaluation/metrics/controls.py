"""Controls: what a model would score that does not look at the image."""

from collections.abc import Iterable
from typing import Protocol

from vlm.evaluation.metrics.captions import CaptionMetric, best_constant, score_captions, shuffled
from vlm.randomness import numpy_rng

CANDIDATES = 1000  # training captions tried as the best constant one


class Captioned(Protocol):
    """A split whose captions can be read."""

    def __len__(self) -> int: ...
    def captions(self, epoch: int, index: int) -> list[str]: ...


def caption_controls(metric: CaptionMetric, train: Captioned, *, seed: int) -> dict[str, float]:
    """Scores of two controls: one caption for all images, and the model's captions given to other images.

    Args:
        metric: What the model's captions were scored by.
        train: The training split.
        seed: Chooses what is drawn.
    Returns:
        metric@constant, of the training caption that scores best for all images alike; metric@shuffled.
    """
    prepared, predictions, references = metric.prepared(), metric.predictions, metric.references
    order = numpy_rng(seed, "constant captions").permutation(len(train))[:CANDIDATES]
    candidates = sorted({caption for index in order for caption in train.captions(0, int(index))[:1]})
    constant, _ = best_constant(prepared, candidates)
    controls = {
        "constant": dict.fromkeys(references, constant),
        "shuffled": shuffled(predictions, seed) if len(predictions) > 1 else dict(predictions),
    }
    scores: dict[str, float] = {}
    for control, captions in controls.items():
        summary = score_captions(captions, prepared).summary()
        exact = sum(caption in references[id] for id, caption in captions.items()) / max(1, len(captions))
        summary = {**summary, "exact_match": exact}
        scores |= {f"{name}@{control}": value for name, value in summary.items()}
    return scores


def novelty(predictions: Iterable[str], train: Captioned) -> float:
    """The share of captions that stand word for word nowhere in the training split's first epoch."""
    written = {tuple(caption.split()) for index in range(len(train)) for caption in train.captions(0, index)}
    captions = [tuple(text.split()) for text in predictions]
    return sum(caption not in written for caption in captions) / len(captions)
