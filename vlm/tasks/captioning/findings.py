"""Finds faults of a captioner in its captions of a split: they ignore the images, do not end, or repeat words."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.report.sections import Finding

FEWEST = 4  # fewest captions from which a fault is concluded
COMPARED = 30  # fewest captions for which an interval is meaningful
LONGEST = 4  # longest run of words that is searched for
TIMES = 3  # consecutive repetitions of a run of words that are a fault

ENCODER = "more images, or a pretrained encoder (model=pretrained): a few hundred images teach none from scratch"
IMAGES = (
    "train longer (trainer.max_epochs): the first captions of any captioner are all alike",
    "lower optim.lr: a third, or a tenth where the weights are pretrained",
    "vlm check-data: do the captions of the data differ, and are these the right images?",
    ENCODER,
)
ENDING = (
    "train longer (trainer.max_epochs): when to end is learned late",
    "task.max_tokens: raise it where the captions of the data are as long",
    "data.max_len: raise it where vlm check-data tells of over-long captions, whose end is cut",
)
REPEATING = (
    "train longer (trainer.max_epochs), or lower optim.lr to a third",
    "--no-repeat-ngram 3, where captions are written",
)
BEAM = "task.beam=4: a beam search repeats less than greedy decoding"


def image_findings(metric: CaptionMetric, scores: Mapping[str, float]) -> list[Finding]:
    """Returns a finding if the captions of the last `compute` ignore the images.

    Args:
        metric: The metric with captions and references.
        scores: cider@low and cider@shuffled, if they were measured.
    """
    if len(metric.predictions) < FEWEST:
        return []
    return [Finding(fault, IMAGES) for fault in _same(metric) or _no_better(metric, scores)]


def text_findings(metric: CaptionMetric, *, max_tokens: int, beam: int) -> list[Finding]:
    """Returns findings if the captions of the last `compute` do not end, or repeat words.

    Args:
        metric: The metric with captions and references.
        max_tokens: Longest text, in tokens.
        beam: Hypotheses of each search with which the model's captions are written.
    """
    count, unfinished = len(metric.predictions), len(metric.unfinished)
    found = []
    if count >= FEWEST and unfinished > 0.1 * count:
        fault = f"the captions do not end: {unfinished:,} of {count:,} end at the limit of {max_tokens} tokens"
        found.append(Finding(fault, ENDING))
    if count >= FEWEST and (fault := _repeating(metric)):
        found.append(Finding(fault, (*REPEATING, *([BEAM] if beam == 1 else []))))
    return found


def _same(metric: CaptionMetric) -> list[str]:
    """Returns a fault if most images have the same caption, which few of them have as a reference."""
    count = len(metric.predictions)
    (caption, often), *_ = Counter(" ".join(text.split()) for text in metric.predictions.values()).most_common(1)
    true = sum(caption in (" ".join(text.split()) for text in texts) for texts in metric.references.values())
    if often <= count / 2 or true > often / 2:
        return []
    return [f"the captions do not depend on the images: {often:,} of {count:,} are the same, {caption!r}"]


def _no_better(metric: CaptionMetric, scores: Mapping[str, float]) -> list[str]:
    """Returns a fault if captions fit their own images no better than other images."""
    if len(metric.predictions) < COMPARED or not scores or scores["cider@low"] > scores["cider@shuffled"]:
        return []
    assert metric.scores is not None, "nothing was computed yet"
    given = f"their CIDEr is {metric.scores.summary()['cider']:.3f}, and {scores['cider@shuffled']:.3f}"
    return [f"the captions do not depend on the images: {given} when each is given to another image"]


def _repeating(metric: CaptionMetric) -> str:
    cut = metric.units.cut
    own = [_repeats(cut(text)) for text in metric.predictions.values()]
    theirs = [_repeats(cut(text)) for texts in metric.references.values() for text in texts]
    if sum(own) / len(own) <= 0.1 + sum(theirs) / max(1, len(theirs)):
        return ""
    return f"{sum(own):,} of {len(own):,} captions repeat words {TIMES} times or more in a row"


def _repeats(words: Sequence[str]) -> bool:
    """Returns True if a run of words repeats several times in a row."""
    return any(any(_runs(words, length)) for length in range(1, LONGEST + 1))


def _runs(words: Sequence[str], length: int) -> Iterator[bool]:
    span = TIMES * length
    for start in range(len(words) - span + 1):
        run = words[start : start + length]
        yield all(words[at : at + length] == run for at in range(start + length, start + span, length))
