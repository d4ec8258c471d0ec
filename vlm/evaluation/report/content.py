"""What a report says, as plain values: its sections, and the verdict that compares a model with its best baseline."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from PIL import Image

from vlm.evaluation.metrics.bootstrap import LEVEL, Difference
from vlm.randomness import numpy_rng

T = TypeVar("T")
MAX_SAMPLES = 8  # samples of a kind in a section


class Finding(NamedTuple):
    """A diagnosed problem of a model and suggested fixes, best first."""

    fault: str
    remedies: Sequence[str]

    def lines(self) -> list[str]:
        return [self.fault, *(f"  {number}. {remedy}" for number, remedy in enumerate(self.remedies, 1))]


@dataclass(frozen=True, kw_only=True)
class Card:
    """A sample with its image and texts.

    Args:
        image: Id of the sample whose image is shown.
        text: Main text.
        lines: Small lines below it.
        references: Texts to compare the main text with.
        draw: Returns a picture of the image, such as one with boxes, given its longest side in pixels; None to show
            the image.
    """

    image: str
    text: str
    lines: Sequence[str] = ()
    references: Sequence[str] = ()
    draw: Callable[[Image.Image, int], Image.Image] | None = None


@dataclass(frozen=True)
class Cards:
    """Cards in a grid."""

    cards: Sequence[Card]


@dataclass(frozen=True, eq=False)
class Confusion:
    """A confusion matrix: counts by true class (rows) and predicted class (columns)."""

    matrix: Sequence[Sequence[int]]
    classes: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Texts:
    """Preformatted texts."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Note:
    """A small paragraph."""

    text: str


@dataclass(frozen=True)
class Pictures:
    """PNG files, each with alternative text."""

    pictures: Sequence[tuple[str, bytes]]


Part = Cards | Confusion | Table | Texts | Note | Pictures


@dataclass(frozen=True)
class Section:
    """Parts under a title."""

    title: str
    parts: Sequence[Part]


def pick_samples(samples: Sequence[T]) -> list[T]:
    """Returns random samples, the same ones in every report."""
    order = numpy_rng("report", len(samples)).permutation(len(samples))
    return [samples[place] for place in order[:MAX_SAMPLES].tolist()]


TITLES = {"bleu4": "BLEU-4", "bleu1": "BLEU-1", "bleu2": "BLEU-2", "bleu3": "BLEU-3", "rouge_l": "ROUGE-L"}
TITLES |= {"cider": "CIDEr", "exact_match": "exact match", "top5": "top 5", "length_ratio": "length ratio"}
TITLES |= {"bleu": "BLEU", "chrf": "chrF", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
TITLES |= {"cer": "character errors", "wer": "word errors", "f1": "F1", "span_f1": "span F1"}
TITLES |= {"ap": "AP", "ap50": "AP at IoU 0.5", "exact_classes": "exact classes"}
TITLES |= {f"{kind}_recall_{depth}": f"{kind} recall at {depth}" for kind in ("text", "image") for depth in (1, 5, 10)}
CONTROLS = {
    "chance": "by chance",
    "constant": "best constant",
    "bag": "bag of words",
    "frequent": "most frequent tag of each word",
    "dictionary": "word for word",
    "overlap": "part next to most words of the question",
    "question": "most frequent answer to the question",
    "unigram": "token frequencies",
    "length": "length of the answers",
    "shuffled": "shuffled",
    "blank": "blank image",
    "random": "random training image",
}
CEILING = {"ceiling": "ceiling"}  # the best possible score, not a control


FEW_STEPS = 1000  # of a training, before which more steps are the first thing to try
FEW_SAMPLES = 10  # of an evaluation, below which an interval says nothing
NEAR_BEST = 0.99  # share of the best possible score from which a model needs no advice
ROUNDING = 1e-9  # differences that are smaller are those of sums in another order
MAX_SCORES = {"bleu": 100.0, "chrf": 100.0, "cider": math.inf}  # largest values of metrics that are not shares
# Names of controls in sentences, if they differ from those in table headers.
PHRASES = {
    "chance": "chance",
    "constant": "the best constant answer",
    "bag": "a bag of words",
    "frequent": "the most frequent tag of each word",
    "dictionary": "a word-for-word dictionary",
    "overlap": "the part of the passage next to most words of the question",
    "question": "the most frequent answer to the question",
    "unigram": "the frequencies of tokens",
    "length": "the length of the answers",
    "shuffled": "the same model with the input of another sample",
    "blank": "the same model with a blank image",
    "random": "a random training image",
}
# Ablations of the model, which a good model need not beat.
ABLATIONS = {"bag": "the same model with the words of each text shuffled"}
TRAIN_LONGER = "train longer (trainer.max_epochs)"
PRETRAINED = "a pretrained model (model=pretrained)"
MORE_DATA = "more data"


def metric_title(name: str) -> str:
    """Returns the name of a metric as people write it."""
    return TITLES.get(name, name.replace("_", " "))


class TrainedModel(NamedTuple):
    """How an evaluated model was trained, as far as its checkpoint says.

    Args:
        steps: Optimiser steps; None if vlm did not train it.
        is_pretrained: Whether the training started from other weights.
        is_on_training_data: Whether the evaluated samples are those that it was trained on.
    """

    steps: int | None = None
    is_pretrained: bool = False
    is_on_training_data: bool = False


class JudgedMetric(NamedTuple):
    """The metric by which a model is judged, and the control that comes closest to the model or beats it.

    Args:
        name, title: The metric's name in the results, and as people write it.
        control: Name of the best control.
        value, baseline: Scores of the model and of the control.
        smaller_is_better: Whether a lower score is better.
        ceiling: Best possible score.
        ablations: Scores of ablations that are better than the control's, by name.
    """

    name: str
    title: str
    control: str
    value: float
    baseline: float
    smaller_is_better: bool
    ceiling: float
    ablations: Mapping[str, float]

    @property
    def is_limited(self) -> bool:
        """Whether the best possible score of these samples is known to be below that of a perfect model."""
        return not self.smaller_is_better and self.ceiling < MAX_SCORES.get(self.name, 1.0)

    @property
    def gain(self) -> float:
        """How much better the model is; 0 for scores that differ by rounding only."""
        gain = (self.baseline - self.value) if self.smaller_is_better else (self.value - self.baseline)
        return gain if abs(gain) > ROUNDING else 0.0

    @property
    def is_near_best(self) -> bool:
        """Whether the model's score is close to the best possible one."""
        return not self.smaller_is_better and 0 < self.ceiling < math.inf and self.value >= NEAR_BEST * self.ceiling

    def is_best(self, value: float) -> bool:
        """Returns True if a score cannot be better."""
        return value <= self.ceiling if self.smaller_is_better else value >= self.ceiling


class Verdict(NamedTuple):
    """A sentence on a model, and remedies in the order to try."""

    sentence: str
    remedies: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Returns the lines of the terminal."""
        advice = [f"to try next: {'; '.join(self.remedies)}"] if self.remedies else []
        return [f"{name:<12}{line}" for name, line in zip(("verdict", ""), [self.sentence, *advice], strict=False)]


def choose_metric(
    results: Mapping[str, float], names: Sequence[str], *, smaller: Collection[str] = (), ignored: Collection[str] = ()
) -> JudgedMetric | None:
    """Returns the first metric that has a control; None if none has.

    Args:
        results: Scores without the name of the split, with controls as metric@control.
        names: Metrics, the one that says most first.
        smaller: Metrics of which a lower score is better.
        ignored: Controls that a good model need not beat; a key of ABLATIONS is named beside the best control.
    """
    for name in names:
        scores = {control: results[f"{name}@{control}"] for control in CONTROLS if f"{name}@{control}" in results}
        controls = {control: score for control, score in scores.items() if control not in ignored}
        if name in results and controls:
            lower_is_better = name in smaller
            best = (min if lower_is_better else max)(controls, key=lambda control: controls[control])
            baseline, sign = controls[best], -1 if lower_is_better else 1
            ablations = {control: scores[control] for control in ignored if control in scores}
            ablations = {control: score for control, score in ablations.items() if sign * (score - baseline) > 0}
            limits = [results[f"{name}@{limit}"] for limit in CEILING if f"{name}@{limit}" in results]
            ceiling = limits[0] if limits else -math.inf if lower_is_better else MAX_SCORES.get(name, 1.0)
            title, value = metric_title(name), results[name]
            return JudgedMetric(name, title, best, value, controls[best], lower_is_better, ceiling, ablations)
    return None


def make_verdict(
    metric: JudgedMetric | None,
    *,
    paired: Difference | None,
    bounds: tuple[float, float] | None,
    samples: str,
    count: int,
    trained: TrainedModel,
    remedies: Sequence[str] | None = None,
) -> Verdict:
    """Returns the verdict on a model.

    Args:
        metric: The metric and its best control; None if the evaluation has no control.
        paired: The difference of the model's and the control's scores on the same resamples, if the task keeps both.
        bounds: The interval of the model's score, if known.
        samples: Numbers of evaluated and of training samples, in words.
        count: Number of evaluated samples.
        trained: How the model was trained.
        remedies: What to try if the model is not better; by default what fits its training.
    """
    samples += ", which the model was trained on" if trained.is_on_training_data else ""
    where = samples + ("" if trained.steps is None else f", after {trained.steps:,} steps")
    if metric is None:
        return Verdict(f"nothing to compare the model with: the evaluation has no control; on {where}")
    control = PHRASES.get(metric.control, CONTROLS[metric.control])
    scores = f"{metric.title} {_format_score(metric.value)} against {_format_score(metric.baseline)}"
    scores += " (lower is better)" if metric.smaller_is_better else ""
    for name, score in metric.ablations.items():
        scores += f" ({ABLATIONS.get(name) or PHRASES.get(name, name)}: {_format_score(score)})"
    if count < FEW_SAMPLES:
        few = f"too few samples to compare the model with {control}: {scores}, on {where}"
        return Verdict(few, (f"evaluate at least {FEW_SAMPLES} samples",))
    if metric.is_best(metric.value) and metric.is_best(metric.baseline):
        return Verdict(f"these data need no model: {control} is as good: {scores}, on {where}")
    if metric.is_best(metric.value) or (bounds is not None and metric.is_limited and metric.is_best(bounds[1])):
        return Verdict(f"as good as the data allow, and better than {control}: {scores}, on {where}")
    ends = (paired.low, paired.high) if paired else bounds and tuple(end - metric.baseline for end in bounds)
    gap = f"a difference of {_format_signed(metric.value - metric.baseline)}"
    if ends is not None:
        kind = "paired interval" if paired else "interval of the model's score"
        gap += f" ({LEVEL:.0%} {kind} {_format_signed(ends[0])} to {_format_signed(ends[1])})"
    if ends is not None and ends[0] <= 0 <= ends[1]:
        word = "not clearly better or worse than"
    else:
        word = "better than" if metric.gain > 0 else "worse than" if metric.gain < 0 else "no better than"
    if word == "better than" and metric.is_near_best:
        remedies = ()
    elif remedies is None or word == "better than":
        remedies = _choose_remedies(word == "better than", trained)
    return Verdict(f"{word} {control}: {scores}, {gap}, on {where}", tuple(remedies))


def _format_score(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def _format_signed(value: float) -> str:
    return "0" if abs(value) <= ROUNDING else f"{value:+#.3g}"


def _choose_remedies(is_better: bool, trained: TrainedModel) -> tuple[str, ...]:
    """Returns what to try next, the likeliest first."""
    if trained.steps is None:
        return () if is_better else ("fine-tune it on data of this kind (vlm train model=pretrained)",)
    if is_better:
        return (TRAIN_LONGER if trained.steps < FEW_STEPS else MORE_DATA if trained.is_pretrained else PRETRAINED,)
    rate = "a third of optim.lr" if trained.is_pretrained else "another optim.lr, or smaller batches"
    return (TRAIN_LONGER, rate, MORE_DATA) if trained.is_pretrained else (TRAIN_LONGER, rate, PRETRAINED, MORE_DATA)
