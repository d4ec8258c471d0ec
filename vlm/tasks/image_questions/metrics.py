"""Accuracy of answers to questions, overall and by kind, with controls that do not see the image."""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from vlm.data.records import Question
from vlm.errors import UserError
from vlm.evaluation.metrics.bootstrap import Scorer, intervals, ratio_scorer
from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import RecordMetric
from vlm.evaluation.metrics.texts import edit_distance
from vlm.tasks.shared.text_controls import MostFrequent

FULL_AGREEMENT = 3  # agreeing people that make an answer fully right
MAX_DISTANCE = 0.5  # of an answer that scores above 0
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
    right, predicted = [process_answer(text) for text in answers], process_answer(answer)
    agreeing, people = sum(text == predicted for text in right), len(right)
    if people < 2:
        return float(agreeing)
    # The person left out is an agreeing one as often as there are people who agree.
    without = min(max(agreeing - 1, 0) / FULL_AGREEMENT, 1)
    return (agreeing * without + (people - agreeing) * min(agreeing / FULL_AGREEMENT, 1)) / people


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
        next_to_space = f"{mark} " in marked or f" {mark}" in marked
        text = text.replace(mark, "" if next_to_space or in_number else " ")
    words = (_DIGITS.get(word, word) for word in _PERIOD.sub("", text).lower().split())
    return " ".join(_APOSTROPHES.get(word, word) for word in words if word not in _ARTICLES)


def compute_anls(answer: str, answers: Sequence[str]) -> float:
    """Normalised Levenshtein similarity of one answer to the nearest right one (ANLS; Biten et al. 2019, equation 1).

    Case and extra white space are ignored. As in the evaluation of the ICDAR competitions, which published scores come
    from, a distance of exactly one half still scores 0.5, where the equation has 0, and the edits are divided by the
    length of the longer text with its extra white space.
    """
    words, distances = " ".join(answer.lower().split()), []
    for reference in answers:
        edits = edit_distance(words, " ".join(reference.lower().split()))
        distances.append(edits / max(len(answer.upper()), len(reference.upper()), 1))
    nearest = min(distances, default=1.0)
    return 1 - nearest if nearest <= MAX_DISTANCE else 0.0


COLUMNS = ("image_id", "question", "answer", "kind", "answers", "before")
CONTROLS = ("shuffled", "blank")  # with another image, and with a blank one
SCORES = ("vqa_accuracy", "anls", "captions")  # further scores
CAPTION = "caption"  # kind of question whose answers are captions


class AnswerMetric(RecordMetric):
    """The share of questions whose answer equals a right one exactly.

    Args:
        scores: Further scores, from ``SCORES``.
    Attributes:
        answers: The questions of the last `compute`, sorted by image: ``COLUMNS``, the answers with their own image as
            "predicted", and those of the controls.
    """

    answers: list[dict[str, Any]]

    def __init__(self, scores: Sequence[str] = ()) -> None:
        super().__init__()
        self.scores = scores

    def update(
        self,
        ids: Sequence[str],
        questions: Sequence[Sequence[Question]],
        answers: Sequence[Sequence[str]],
        column: str = "predicted",
    ) -> None:
        """Adds the answers to the questions about some images.

        Args:
            column: "predicted", or one of ``CONTROLS``.
        """
        for id, image_questions, texts in zip(ids, questions, answers, strict=True):
            pairs = enumerate(zip(image_questions, texts, strict=True))
            self.add((f"{id}#{n:04d}#{column}", n, column, text, id, *question) for n, (question, text) in pairs)

    def compute(self) -> dict[str, float]:
        """Returns ``accuracy``, and ``accuracy_KIND`` if there are several kinds of questions.

        Raises:
            UserError: Nothing was added.
        """
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for number, column, text, *values in self.rows().values():
            pairs = zip(COLUMNS, values, strict=True)
            row = {name: value for name, value in pairs if value or name not in ("answers", "before")}
            rows.setdefault((values[0], number), row)[column] = text
        self.answers = [row for row in rows.values() if "predicted" in row]  # not if the own image is unreadable
        if not self.answers:
            raise UserError("no question to score: no image could be read, or the split is empty", status=1)
        return self._accuracies("predicted") | self._compute_further_scores()

    def _compute_further_scores(self) -> dict[str, float]:
        """Returns the further scores over all questions; caption scores over those of kind "caption", if any."""
        pairs = [(row["predicted"], row.get("answers") or [row["answer"]]) for row in self.answers]
        scores = {}
        for name, score in {"vqa_accuracy": vqa_accuracy, "anls": compute_anls}.items():
            if name in self.scores:
                scores[name] = fmean(score(text, right) for text, right in pairs)
        if "captions" in self.scores:
            chosen = [at for at, row in enumerate(self.answers) if row["kind"] == CAPTION] or range(len(pairs))
            texts, references = zip(*(pairs[at] for at in chosen), strict=True)
            metric = CaptionMetric()
            metric.update([str(at) for at in chosen], texts, references)
            metric.compute()
            assert metric.scores is not None
            scores |= metric.scores.summary()
        return scores

    def controls(self, train: Iterable[Question]) -> dict[str, float]:
        """Returns metric@constant, of each question's most frequent answer in train, metric@shuffled and metric@blank.

        A control covers only the questions that were asked under it. metric@constant shows what can be known without
        images: a question that train lacks in its conversation gets the most frequent answer to it elsewhere, or to
        questions of its kind.
        """
        pairs = ((_keys(question.text, question.kind, question.before), question.answer) for question in train)
        frequent = MostFrequent(pairs, of_equals=max)
        for row in self.answers:
            row["constant"] = frequent.value(_keys(row["question"], row["kind"], row.get("before", ())))
        scores = {control: self._accuracies(control) for control in ("constant", *CONTROLS)}
        return {f"{name}@{control}": value for control, values in scores.items() for name, value in values.items()}

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns accuracy@low and accuracy@high: a 95% interval by bootstrap over images."""
        counts = self._counts("predicted", self.answers)
        return intervals(["accuracy"], ratio_scorer(counts), len(counts), seed=seed)

    def scorers(self, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of the accuracy of the model and of a control, and the number of images.

        They cover the questions that were asked under the control.
        """
        rows = [row for row in self.answers if control in row]
        model, baseline = (self._counts(column, rows) for column in ("predicted", control))
        return ratio_scorer(model), ratio_scorer(baseline), len(model)

    def _counts(self, column: str, rows: Sequence[Mapping[str, Any]]) -> Floats:
        """Counts the right answers and the questions of each image. Shapes: -> (N, 2)"""
        images = {image: place for place, image in enumerate(dict.fromkeys(row["image_id"] for row in rows))}
        counts = np.zeros((len(images), 2))
        for row in rows:
            counts[images[row["image_id"]]] += (is_right(row, column), 1)
        return counts

    def kinds(self) -> list[str]:
        """Returns the kinds of questions, if there are several."""
        kinds = sorted({row["kind"] for row in self.answers})
        return kinds if len(kinds) > 1 else []

    def _accuracies(self, column: str) -> dict[str, float]:
        right = [(row["kind"], is_right(row, column)) for row in self.answers if column in row]
        hits = {"accuracy": [hit for _, hit in right]}
        hits |= {f"accuracy_{kind}": [hit for row_kind, hit in right if row_kind == kind] for kind in self.kinds()}
        return {name: sum(flags) / len(flags) for name, flags in hits.items() if flags}

    def _start(self) -> None:
        super()._start()
        self.answers = []


def is_right(row: Mapping[str, Any], column: str = "predicted") -> bool:
    """Returns True if the answer of a row equals a right one exactly."""
    return row[column] == row["answer"] or row[column] in row.get("answers", ())


def _keys(text: str, kind: str, before: Sequence[Sequence[str]]) -> list[Hashable]:
    """Returns keys of a question that do not depend on the image, from the most specific to the most general."""
    earlier = (part for turn in before for part in turn)
    return [("turns", *earlier, text), ("text", text), ("kind", kind)]
