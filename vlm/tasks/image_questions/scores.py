"""Scores of answers that may be partly right."""

import re
from collections.abc import Sequence

from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.metrics.edits import edit_distance

ENOUGH = 3  # agreeing people that make an answer fully right
NEAR = 0.5  # distance from which an answer scores 0
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {name: str(value) for value, name in enumerate(_NUMBERS)} | {"none": "0"}
_ARTICLES = ("a", "an", "the")
_PUNCTUATION = re.compile(r"[^\w\s.,]|_|[.,](?!\d)|(?<!\d)[.,]")  # except a point or comma between digits


def vqa_accuracy(answer: str, answers: Sequence[str]) -> float:
    """The accuracy of VQA (Antol et al. 2015): the mean of min(agreeing / 3, 1), leaving out one person at a time.

    Both sides are normalised as in its evaluation: lower case, no articles or punctuation, numbers as digits.
    Apostrophes are ignored, where the original has a table of contractions.
    """
    plain, own = [plain_answer(one) for one in answers], plain_answer(answer)
    agreeing, people = sum(one == own for one in plain), len(plain)
    if people < 2:
        return float(agreeing)
    # The person left out is an agreeing one as often as there are people who agree.
    without = min(max(agreeing - 1, 0) / ENOUGH, 1)
    return (agreeing * without + (people - agreeing) * min(agreeing / ENOUGH, 1)) / people


def plain_answer(answer: str) -> str:
    """Normalises an answer as in VQA."""
    text = _PUNCTUATION.sub(" ", answer.lower().replace("'", "").replace("\u2019", ""))
    words = (word for word in text.split() if word not in _ARTICLES)
    return " ".join(_DIGITS.get(word, word) for word in words)


def anls(answer: str, answers: Sequence[str]) -> float:
    """Normalised Levenshtein similarity of one answer to the nearest right one (ANLS; Biten et al. 2019, equation 1).

    Case and extra white space are ignored.
    """
    own = " ".join(answer.lower().split())
    distances = (_distance(own, " ".join(one.lower().split())) for one in answers)
    nearest = min(distances, default=1.0)
    return 1 - nearest if nearest < NEAR else 0.0


def _distance(one: str, other: str) -> float:
    """Returns the edit distance of two texts, divided by the length of the longer."""
    return edit_distance(one, other) / max(len(one), len(other), 1)


def caption_scores(ids: Sequence[str], answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns COCO's caption metrics of answers that are captions."""
    metric = CaptionMetric()
    metric.update(ids, answers, references)
    metric.compute()
    assert metric.scores is not None
    return metric.scores.summary()
