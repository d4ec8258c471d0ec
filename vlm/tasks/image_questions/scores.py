"""Scores of answers that may be partly right."""

import re
from collections.abc import Sequence

from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.metrics.edits import edit_distance

ENOUGH = 3  # agreeing people that make an answer fully right
FURTHEST = 0.5  # an answer at a greater distance scores 0
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {name: str(value) for value, name in enumerate(_NUMBERS)} | {"none": "0"}
_ARTICLES = ("a", "an", "the")
_PUNCTUATION = '-,;/[](){}<>=+\\_@`"?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")  # any but a decimal point
# The contractions of VQA's evaluation, and "it's".
_CONTRACTIONS = """
'ow's'at 'twas ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't
he'd he'd've he's how'd how'll how's i'd've i'm i've isn't it'd it'd've it'll it's ma'am might've mightn't mightn't've
must've mustn't needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd
somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've
something'll that's there'd there'd've there're there's they'd they'd've they'll they're they've wasn't we'd've we've
weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're
why's won't would've wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""
_APOSTROPHES = {
    word[:place] + word[place + 1 :]: word
    for word in _CONTRACTIONS.split()
    for place, mark in enumerate(word)
    if mark == "'"
}


def vqa_accuracy(answer: str, answers: Sequence[str]) -> float:
    """The accuracy of VQA (Antol et al. 2015): the mean of min(agreeing / 3, 1), leaving out one person at a time.

    Both sides are processed by `process_answer`, as https://visualqa.org/evaluation.html says. VQA's script leaves the
    people's answers as they are if all are equal, so that "1000" would not agree with ten times "1,000". An answer of
    one person is right if it agrees.
    """
    right, own = [process_answer(one) for one in answers], process_answer(answer)
    agreeing, people = sum(one == own for one in right), len(right)
    if people < 2:
        return float(agreeing)
    # The person left out is an agreeing one as often as there are people who agree.
    without = min(max(agreeing - 1, 0) / ENOUGH, 1)
    return (agreeing * without + (people - agreeing) * min(agreeing / ENOUGH, 1)) / people


def process_answer(answer: str) -> str:
    """Processes an answer as VQA's evaluation does: lower case, numbers as digits, no articles, apostrophes added.

    Punctuation follows the script (GT-Vision-Lab/VQA, vqaEval.py), because published scores do: a mark is removed if
    one of its kind is next to a space or if the answer has a comma between digits; else it becomes a space. Periods are
    removed, except before a digit. Apostrophes, colons, other symbols and other punctuation remain.

    Differences from the script: "its" gets an apostrophe like other contractions; so do "im", "ive", "id've" and
    "i'dve", which the script's table has with a capital that no lower-cased answer has; a typographic apostrophe is an
    apostrophe; and all periods are removed, where the script removes 32.
    """
    text = marked = answer.replace("\u2019", "'").replace("\n", " ").replace("\t", " ").strip()
    in_number = _COMMA_IN_NUMBER.search(marked) is not None
    for mark in _PUNCTUATION:
        beside_space = f"{mark} " in marked or f" {mark}" in marked
        text = text.replace(mark, "" if beside_space or in_number else " ")
    words = (_DIGITS.get(word, word) for word in _PERIOD.sub("", text).lower().split())
    return " ".join(_APOSTROPHES.get(word, word) for word in words if word not in _ARTICLES)


def anls(answer: str, answers: Sequence[str]) -> float:
    """Normalised Levenshtein similarity of one answer to the nearest right one (ANLS; Biten et al. 2019, equation 1).

    Case and extra white space are ignored. As in the evaluation of the ICDAR competitions, which published scores come
    from, a distance of exactly one half still scores 0.5, where the equation has 0, and the edits are divided by the
    length of the longer text with its extra white space.
    """
    nearest = min((_distance(answer, one) for one in answers), default=1.0)
    return 1 - nearest if nearest <= FURTHEST else 0.0


def _distance(one: str, other: str) -> float:
    """Returns the edit distance of two texts, divided by the length of the longer."""
    edits = edit_distance(" ".join(one.lower().split()), " ".join(other.lower().split()))
    return edits / max(len(one.upper()), len(other.upper()), 1)


def caption_scores(ids: Sequence[str], answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns COCO's caption metrics of answers that are captions."""
    metric = CaptionMetric()
    metric.update(ids, answers, references)
    metric.compute()
    assert metric.scores is not None
    return metric.scores.summary()
