"""Questions about images: the model reads an image and a question, and generates the answer."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Unpack

import torch

from vlm.data.batch import Batch
from vlm.data.records import Question
from vlm.data.text.conversation_field import ConversationField
from vlm.errors import Count, printable
from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.evaluation.report.sections import Card, Cards, Section, Table, pick_samples
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.flop import encoder_flop
from vlm.tasks.captioning.predict import encode_pixels
from vlm.tasks.image_questions.metrics import AnswerMetric, is_right
from vlm.tasks.image_questions.predict import answer_questions, room_for_prompt
from vlm.tasks.shared.show import example_image, example_record
from vlm.tasks.shared.text_tasks import ImageTextTask
from vlm.training.data_module import Data
from vlm.training.step.task import TaskOptions

FREE_TEXT = "task.scores=[anls,captions], because these answers are free text, and none equals its reference"
FREE_WORDS = 3  # mean length from which answers are free text
CONTROL_NAMES = {"": "model", "@constant": "question alone", "@shuffled": "other image", "@blank": "blank image"}
READ = 20_000  # training images whose questions the control without images reads


class ImageQuestions(ImageTextTask):
    """Visual question answering (Antol et al. 2015) with a captioner: it reads the question and predicts the answer.

    Args:
        scores: Scores in addition to the accuracy: vqa_accuracy, anls, captions.
        others: As in ImageTextTask; fields are images, and questions or conversations.
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
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, max_tokens=max_tokens, **options)
        self.answers = AnswerMetric(scores)
        field = self.fields[self.text_field]
        if isinstance(field, ConversationField) and model.decoder.prefix is not None:
            field.states = encoder_flop(model.encoder, self.preprocess.image_size)[1].states.shape[1]

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        """Adds a batch's loss and the model's answers; in a final evaluation, also the answers of the controls.

        In the shuffled control, an image gets the questions of the sample's partner, as in the loss's control.
        """
        context = encode_pixels(self.model, self.preprocess, batch["images"])  # shared by losses and answers
        self.add_losses(batch, context)
        if not batch.ids:
            return
        rows, partners = batch["questions"], batch["questions"].partners
        answers = self._answer(context, rows.references)
        self.answers.update(batch.ids, rows.references, answers)
        for id, questions, texts in zip(batch.ids, rows.references, answers, strict=True):
            lines = (_line(question, text) for question, text in zip(questions, texts, strict=True))
            self.evaluation.samples.append({"image_id": id, "line": "\n".join(lines)})
        if not final:
            return
        blank = self.blank(batch["images"]).rows(torch.zeros(len(batch.ids), dtype=torch.long, device=self.device))
        self.answers.update(batch.ids, rows.references, self._answer(blank, rows.references), "blank")
        if partners.indices != rows.indices:  # a lone sample is its own partner
            self.answers.update(
                partners.ids, partners.references, self._answer(context, partners.references), "shuffled"
            )

    def _answer(self, context: Context, questions_by_image: Sequence[Sequence[Question]]) -> list[list[str]]:
        field: Any = self.fields[self.text_field]
        room = room_for_prompt(self.model, self.max_tokens)
        prompts = [[field.prompt(question, room) for question in questions] for questions in questions_by_image]
        by_image = answer_questions(self.model, self.tokenizer, context, prompts, max_tokens=self.max_tokens)
        return [[answer.text for answer in answers] for answers in by_image]

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
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

    def predictions(self) -> list[dict[str, Any]]:
        names = {"image_id": "image_id", "question": "question", "answer": "predicted"}
        return [{name: row[column] for name, column in names.items()} for row in self.answers.answers]

    def details(self) -> dict[str, Any]:
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


def _card(row: Mapping[str, Any]) -> Card:
    right = "right" if is_right(row) else f"right: {row['answer']}"
    before = " ".join(words for _, words in row.get("before", ()))
    text = f"{before} {row['question']} {row['predicted']}".strip()
    return Card(image=row["image_id"], text=text, lines=[right, row["image_id"]])


def _line(question: Question, answer: str) -> str:
    mark = "(right)" if question.accepts(answer) else f"(true: {printable(question.answer)})"
    return f"{printable(question.text)} {printable(answer)} {mark}"
