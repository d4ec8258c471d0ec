"""Controls: scores of captions that ignore the image."""

from collections.abc import Iterable

from vlm.data.records import Split
from vlm.evaluation.metrics.captions import CaptionMetric, exact_matches, shuffle_captions
from vlm.evaluation.metrics.coco import best_constant, score_captions
from vlm.evaluation.metrics.edits import caption_rates
from vlm.evaluation.metrics.tokens import Units
from vlm.randomness import numpy_rng

CANDIDATES = 1000  # training captions tried as the best constant one


def caption_controls(metric: CaptionMetric, train: Split, *, seed: int) -> dict[str, float]:
    """Returns the scores of two controls: one caption for all images, and the model's captions given to other images.

    Args:
        metric: The metric that scored the model's captions.
        train: The training split.
        seed: Seed of random choices.
    Returns:
        metric@constant, of the one training caption that scores best on all images; metric@shuffled.
    """
    prepared, predictions, references = metric.prepared(), metric.predictions, metric.references
    order = numpy_rng(seed, "constant captions").permutation(len(train))[:CANDIDATES]
    candidates = sorted({caption for index in order for caption in train.record(int(index))["captions"][:1]})
    constant, _ = best_constant(prepared, candidates)
    controls = metric.controls = {
        "constant": dict.fromkeys(references, constant),
        "shuffled": shuffle_captions(predictions, seed) if len(predictions) > 1 else dict(predictions),
    }
    scores: dict[str, float] = {}
    for control, captions in controls.items():
        summary = score_captions(captions, prepared).summary()
        exact = exact_matches(captions, references)
        summary = {**summary, "exact_match": sum(exact) / max(1, len(captions)), **caption_rates(captions, references)}
        scores |= {f"{name}@{control}": value for name, value in summary.items()}
    return scores


def beside_scores(metric: CaptionMetric, train: Split, *, seed: int) -> dict[str, float]:
    """Returns controls, novelty and intervals, which a test adds to its scores; arguments as in `caption_controls`."""
    results = caption_controls(metric, train, seed=seed)
    results["novelty"] = novelty(metric.predictions.values(), train, metric.units)
    return results | metric.intervals(seed=seed)


def novelty(predictions: Iterable[str], train: Split, units: Units) -> float:
    """Returns the share of captions that the training split's first epoch lacks, compared in the metrics' units."""
    written = {tuple(units.cut(caption)) for record in train.records() for caption in record["captions"]}
    captions = [tuple(units.cut(text)) for text in predictions]
    return sum(caption not in written for caption in captions) / len(captions)
