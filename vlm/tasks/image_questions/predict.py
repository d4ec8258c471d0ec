"""Answering questions about images with a trained model: load, preprocess, predict, format; the command `answer`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from vlm.data.text.tokenizer import Tokenizer
from vlm.decoding.continuation import continue_texts
from vlm.decoding.sampling import Sampling
from vlm.errors import Count, UserError
from vlm.inference.inputs import find_images, image_batches, read_images
from vlm.inference.options import Files, ModelOptions, Option, Workers, choose_workers, questions_of
from vlm.inference.text.text_rows import note_cut
from vlm.io.output import Output, Records
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.tasks.captioning.predict import Captioner


@dataclass
class Answer:
    """An answer, with its log-probability in nats."""

    text: str = ""
    logprob: float = 0.0
    tokens: list[int] = field(default_factory=list)


def answer_questions(
    model: VisionLanguageModel,
    tokenizer: Tokenizer,
    context: Context,
    questions: Sequence[Sequence[str]],
    *,
    max_tokens: int,
) -> list[list[Answer]]:
    """The likeliest answer to each question of each image, token by token; evaluation and `vlm answer` go through here.

    Of a question that leaves no room for an answer, the beginning is cut.

    Args:
        context: The encoded images, a row each.
    """
    room = model.decoder.max_len - 1 - max_tokens
    prompts = [
        [tokenizer.bos_id, *tokenizer.encode(question)[-max(1, room) :]] for asked in questions for question in asked
    ]
    rows = [row for row, asked in enumerate(questions) for _ in asked]
    answers = [Answer() for _ in prompts]
    options: Any = {"sampling": Sampling(temperature=0.0), "max_tokens": max_tokens, "seed": 0}
    beside = context.rows(torch.tensor(rows, dtype=torch.long, device=context.states.device))
    # Autocast would cast the weights anew for every token; and weights are evaluated as they are.
    with torch.autocast(context.states.device.type, enabled=False):
        for drawn in continue_texts(model.decoder, prompts, context=beside, eos_id=tokenizer.eos_id, **options):
            for item in drawn:
                answers[item.prompt].logprob += item.logprob
                answers[item.prompt].tokens.append(item.token)
    for answer in answers:
        answer.text = tokenizer.decode(answer.tokens).strip()
    remaining = iter(answers)
    return [[next(remaining) for _ in asked] for asked in questions]


class Answerer(Captioner):
    """A trained model that answers questions about images, ready to use; arguments as in Predictor."""

    task = "image_questions"
    attention = None  # type: ignore[assignment]  # what is drawn is of captions
    fields = ("image", "question", "answer")

    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        raise UserError("vlm predict: this model answers questions; use vlm answer IMAGES --question Q")

    def use(  # type: ignore[override]  # a search has no part in it
        self,
        inputs: Sequence[Any],
        *,
        question: str | Sequence[str] = (),
        batch_size: Count = 32,
        workers: Workers = None,
    ) -> list[Any]:
        """The answer to a question about each image, or the answers to several.

        A model of several images a record answers about so many that follow each other.

        Args:
            inputs: Paths, images of Pillow, or arrays (H, W, 3).
            question: Question about each image, or a list of questions.
            batch_size: Images at a time.
            workers: Threads that read images ahead; by default one a CPU, up to 8.
        Raises:
            UserError: The images are no multiple of those that the model reads at once.
        """
        questions = questions_of(question)
        self.check_count(len(inputs))
        size = batch_size * self.images
        batches = image_batches(inputs, self.pixels, batch_size=size, workers=choose_workers(workers))
        rows = [answers for batch in batches for answers in self.answer(self.records(batch), questions)]
        return [answers[0] for answers in rows] if isinstance(question, str) else rows

    @property
    def images(self) -> int:
        """Images that belong together: of a model of several images a record, so many files that follow each other."""
        return getattr(self.model.encoder, "count", 1)

    def check_count(self, count: int) -> None:
        """Refuses a number of images that does not make whole records."""
        if count % self.images:
            at_once = f"this model reads {self.images} at once"
            raise UserError(f"images: {count} images; {at_once}, so give a multiple of that")

    def records(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        """Images as records: (3, H, W) each, or (K, 3, H, W) of a model of several."""
        starts = range(0, len(pixels), self.images)
        return [torch.stack([*pixels[at : at + self.images]]).squeeze(0) for at in starts]

    def answer(self, pixels: Sequence[Tensor], questions: Sequence[str]) -> list[list[Answer]]:
        """The answers to the same questions about each of a batch of records of images that `pixels` made."""
        context = self.encode(pixels)
        return answer_questions(
            self.model, self.tokenizer, context, [questions] * len(pixels), max_tokens=self.max_tokens
        )


def answer_files(
    answerer: Answerer,
    paths: Sequence[str],
    questions: Sequence[str],
    records: Records,
    *,
    batch_size: int,
    workers: int = 0,
) -> int:
    """Answers questions about image files and writes a record for each; returns the exit status.

    A file that cannot be read is named on stderr and does not keep questions about the others from being answered.

    Raises:
        UserError: The model reads several images at once, and the files are no multiple of that.
    """
    failed, together = 0, answerer.images
    answerer.check_count(len(paths))
    lengths = [len(answerer.tokenizer.encode(question)) for question in questions]
    room = max(1, answerer.model.decoder.max_len - 1 - answerer.max_tokens)
    note_cut(lengths, room, names="questions", part="beginning")
    answerer.prepack(min(batch_size, len(paths)) * len(questions))
    size = batch_size * together
    read = read_images(paths, answerer.pixels, batch_size=size, workers=workers)
    for start, (good, pixels, bad) in zip(range(0, len(paths), size), read, strict=True):
        failed += bad
        there, batch = dict(zip(good, pixels, strict=True)), paths[start : start + size]
        groups = [batch[at : at + together] for at in range(0, len(batch), together)]
        groups = [group for group in groups if all(path in there for path in group)]
        inputs = answerer.records([there[path] for group in groups for path in group])
        for group, answers in zip(groups, answerer.answer(inputs, questions) if inputs else [], strict=True):
            for question, answer in zip(questions, answers, strict=True):
                about = {"image": " ".join(group), "question": question}
                records.write({**about, "answer": answer.text, "logprob": answer.logprob})
    return 1 if failed else 0


def command(
    files: Files,
    model: ModelOptions,
    question: Annotated[list[str], Option("Question about each image; may be repeated.")],
    workers: Workers = None,
) -> int:
    """Answers questions about images as the options say; returns the exit status."""
    questions = questions_of(question, option="--question")
    paths = find_images(files, repeated=True)  # they may be parts of several records
    output = Output(model.out, inputs=[*paths, model.checkpoint])
    records = Records(form=model.form, fields=Answerer.fields, output=output)
    answerer = model.load(Answerer)
    with output:
        options: Any = {"batch_size": model.batch_size, "workers": choose_workers(workers)}
        return answer_files(answerer, paths, questions, records, **options)
