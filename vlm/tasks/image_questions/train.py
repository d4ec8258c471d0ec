"""Questions about images: the model reads an image and a question, and generates the answer."""

import re
import shlex
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import compress, islice
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Unpack

import numpy as np
import torch

from vlm.data.batch import Batch, PromptRows, TextRows
from vlm.data.images.augment import Augment
from vlm.data.records import Question
from vlm.data.text.conversation_field import ConversationField
from vlm.data.text.prompt_field import PromptField
from vlm.errors import Count, UserError, printable
from vlm.evaluation.metrics.bootstrap import Scorer, intervals, ratio_scorer
from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import RecordMetric
from vlm.evaluation.metrics.texts import edit_distance
from vlm.evaluation.report.content import Card, Cards, Section, Table, pick_samples
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.flop import encoder_flop
from vlm.tasks.captioning.predict import encode_pixels
from vlm.tasks.image_questions.predict import answer_questions, room_for_prompt
from vlm.tasks.shared.policy_gradient import RewardedTextTask, RewardOptions
from vlm.tasks.shared.show import example_image, example_record
from vlm.tasks.shared.text_tasks import MostFrequent, TextSearch, prompt_contexts
from vlm.training.data_module import Data
from vlm.untrusted.sizes import JsonValue

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
COLUMNS = ("image_id", "question", "answer", "kind", "answers", "before")
CONTROLS = ("shuffled", "blank")  # with another image, and with a blank one
SCORES = ("vqa_accuracy", "anls", "captions")  # further scores
CAPTION = "caption"  # kind of question whose answers are captions
FREE_TEXT = "task.scores=[anls,captions], because these answers are free text, and none equals its reference"
FREE_WORDS = 3  # mean length from which answers are free text
CONTROL_NAMES = {"": "model", "@constant": "question alone", "@shuffled": "other image", "@blank": "blank image"}
READ = 20_000  # training images whose questions the control without images reads


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
            self.add((f"{id}#{n:04d}#{column}", n, column, text, id, *question[:5]) for n, (question, text) in pairs)

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


class ImageQuestions(RewardedTextTask):
    """Visual question answering (Antol et al. 2015) with a captioner: it reads the question and predicts the answer.

    Args:
        scores: Scores in addition to the accuracy: vqa_accuracy, anls, captions.
        others: As in RewardedTextTask; fields are images, and questions or conversations.
    """

    name = "image_questions"
    headlines = ("accuracy",)
    curves = ("accuracy",)
    text_field, segment_name = "questions", "question"

    def __init__(
        self,
        *,
        model: VisionLanguageModel,
        max_tokens: Count,
        scores: Sequence[Literal["vqa_accuracy", "anls", "captions"]] = (),
        **options: Unpack[RewardOptions],
    ) -> None:
        super().__init__(model=model, max_tokens=max_tokens, **options)
        self.answers = AnswerMetric(scores)
        self.search = TextSearch(self, max_tokens=max_tokens, ends=self.ends)  # of prompts with images inside
        field = self.fields[self.text_field]
        if isinstance(field, ConversationField) and field.bins is not None:
            refuse_moved_boxes(self.fields["images"].augment)  # type: ignore[attr-defined]
        if isinstance(field, ConversationField) and model.decoder.prefix is not None:
            field.states = encoder_flop(model.encoder, self.preprocess.image_size)[1].states.shape[1]

    def prompt_tokens(self, reference: Any) -> list[int]:
        field: Any = self.fields[self.text_field]
        return field.prompt(reference, room_for_prompt(self.model, self.max_tokens))

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        self.search.begin()

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        """Adds a batch's loss and the model's answers; in a final evaluation, also the answers of the controls.

        In the shuffled control, an image gets the questions of the sample's partner, as in the loss's control.
        """
        context = encode_pixels(self.model, self.preprocess, batch["images"])  # shared by losses and answers
        self.add_losses(batch, context)
        if not batch.ids:
            return
        rows, partners = batch["questions"], batch["questions"].partners
        answers = self._answer(context, rows, final=final)
        self.answers.update(batch.ids, rows.references, answers)
        for id, questions, texts in zip(batch.ids, rows.references, answers, strict=True):
            lines = (_line(question, text) for question, text in zip(questions, texts, strict=True))
            self.evaluation.samples.append({"image_id": id, "line": "\n".join(lines)})
        if not final:
            return
        blank = self.blank(batch["images"]).rows(torch.zeros(len(context.states), dtype=torch.long, device=self.device))
        self._add_control("blank", rows, self._answer(blank, rows, final=final))
        if partners.indices != rows.indices:  # a lone sample is its own partner
            self._add_control("shuffled", partners, self._answer(context, partners, final=final))

    def _add_control(self, name: str, rows: TextRows, answers: Sequence[Sequence[str]]) -> None:
        """Adds the answers of a control, except those to questions without an image."""
        kept = [True] * len(answers) if rows.has_image is None else rows.has_image.tolist()
        columns: tuple[Any, ...] = (rows.ids, rows.references, answers)
        ids, questions, answers = (list(compress(column, kept)) for column in columns)
        self.answers.update(ids, questions, answers, name)

    def _answer(self, context: Context, rows: TextRows, *, final: bool) -> list[list[str]]:
        """Returns the answers to the questions of each row."""
        questions_by_image: Sequence[Sequence[Question]] = rows.references
        if isinstance(rows, PromptRows):
            contexts = prompt_contexts(rows, context.states)
            answers = (text for part in contexts for text in self.search.texts(part, final=final))
            return [[next(answers).text.strip() for _ in questions] for questions in questions_by_image]
        prompts = [[self.prompt_tokens(question) for question in questions] for questions in questions_by_image]
        by_image = answer_questions(self.model, self.tokenizer, context, prompts, max_tokens=self.max_tokens)
        return [[answer.text for answer in answers] for answers in by_image]

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        self.search.end()
        results = self.answers.compute() | self.grounding.results(loss, self.sum_over_ranks)
        if final:
            train = islice(self.data.split("train").records(), READ)
            results |= self.answers.controls(question for record in train for question in record["questions"])
            results |= self.answers.intervals(seed=self.seed)
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        return self.answers.scorers(control)

    def remedies(self, results: Mapping[str, float]) -> Sequence[str] | None:
        """Suggests other scores if answers are free text, which rarely equals its reference."""
        mean_words = fmean(len(row["answer"].split()) for row in self.answers.answers)
        if results["accuracy"] or mean_words < FREE_WORDS:
            return None
        return [] if "anls" in self.answers.scores else [FREE_TEXT]

    def description(self) -> dict[str, JsonValue]:
        about = super().description()
        if isinstance(self.fields[self.text_field], PromptField):  # it also captions and chats, as its folder does
            about |= {"task": "captioning", **self.search.description()}
        return about

    def predictions(self) -> list[dict[str, JsonValue]]:
        names = {"image_id": "image_id", "question": "question", "answer": "predicted"}
        return [{name: row[column] for name, column in names.items()} for row in self.answers.answers]

    def details(self) -> dict[str, JsonValue]:
        return {"questions": self.answers.answers}

    def report(self) -> list[Section]:
        """The accuracies of each kind of question, random answers, and wrong ones."""
        scores = {name.split("/", 1)[1]: value for name, value in self.evaluation.results.items()}
        controls = [control for control in CONTROL_NAMES if f"accuracy{control}" in scores]
        table, sections = [], []
        for kind in self.answers.kinds():
            shares = [scores.get(f"accuracy_{kind}{control}") for control in controls]
            table.append([kind, *("" if share is None else f"{share:.1%}" for share in shares)])
        if table:
            header = ["kind of question", *(CONTROL_NAMES[control] for control in controls)]
            sections.append(Section("Kinds of question", [Table(header, table)]))
        wrong = [row for row in self.answers.answers if not is_right(row)]
        kinds = {"Random answers": pick_samples(self.answers.answers), "Wrong answers": pick_samples(wrong)}
        return sections + [Section(title, [Cards(list(map(_card, some)))]) for title, some in kinds.items() if some]

    def example(self, data: Data, folder: Path) -> str:
        question = example_record(data)[0]["questions"][0].text
        return f"vlm answer {example_image(data, folder)} --question {shlex.quote(question)}"


def refuse_moved_boxes(augment: Augment | None) -> None:
    """Checks that images are not moved, because boxes in texts would not follow.

    Raises:
        UserError: They are cropped or mirrored.
    """
    moving = ("min_scale", "min_ratio", "horizontal_flip", "pad_crop", "policy")
    if augment is not None and (moved := [part for part in augment.enabled_options if part.startswith(moving)]):
        remedy = "turn it off, or set task.fields.questions.bins=null"
        raise UserError(f"data.augment.{moved[0]}: boxes in texts do not follow; {remedy}")


def _card(row: Mapping[str, Any]) -> Card:
    right = "right" if is_right(row) else f"right: {row['answer']}"
    before = " ".join(words for _, words in row.get("before", ()))
    text = f"{before} {row['question']} {row['predicted']}".strip()
    return Card(image=row["image_id"], text=text, lines=[right, row["image_id"]])


def _line(question: Question, answer: str) -> str:
    mark = "(right)" if question.accepts(answer) else f"(true: {printable(question.answer)})"
    return f"{printable(question.text)} {printable(answer)} {mark}"
