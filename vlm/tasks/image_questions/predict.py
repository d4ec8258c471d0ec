"""Answering questions about images, by a trained model or by one that reads images inside its prompts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlm.checkpoint.stored import DecodingDefaults
from vlm.data.text.conversation import Turn
from vlm.data.text.conversation_field import question_prompt
from vlm.data.text.tokenizer import Tokenizer
from vlm.decoding.constraints import Rules
from vlm.decoding.continuation import continue_texts
from vlm.decoding.grammar import Grammar
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.inference.arguments import ImageFileArguments, list_questions, single_prompt
from vlm.inference.command_options import PromptedQuestionOptions, QuestionOptions
from vlm.inference.inputs import ImageSource, open_image
from vlm.inference.options import check_stored_decoding
from vlm.inference.predictor import BatchPredictor, Rows, Stored, Watch, note_truncation
from vlm.inference.writing import Text, best_or_list
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.tasks.captioning.predict import ImagePrompt, ImageTextPredictor, ImageWriter, encode_pixels


@dataclass
class ImageAnswer:
    """An answer about an image.

    Args:
        text: The answer.
        logprob: Its log-probability in nats.
        tokens: The ids that were written.
    """

    text: str = ""
    logprob: float = 0.0
    tokens: list[int] = field(default_factory=list)


def answer_questions(
    model: VisionLanguageModel,
    tokenizer: Tokenizer,
    context: Context,
    questions: Sequence[Sequence[Sequence[int]]],
    *,
    max_tokens: int,
    grammar: Grammar | None = None,
) -> list[list[ImageAnswer]]:
    """Answers the questions about each image by greedy decoding; used by evaluation and `vlm answer`.

    Args:
        context: The encoded images, one row each.
        questions: Token ids of each image's prompts.
        grammar: What each answer matches.
    """
    prompts = [prompt for image_prompts in questions for prompt in image_prompts]
    rows = [row for row, image_prompts in enumerate(questions) for _ in image_prompts]
    answers = [ImageAnswer() for _ in prompts]
    greedy, eos_id = Sampling(temperature=0.0), tokenizer.eos_id
    contexts = context.rows(torch.tensor(rows, dtype=torch.long, device=context.states.device))
    # Autocast would cast the weights again for every token; and evaluation uses the weights as they are.
    with torch.autocast(context.states.device.type, enabled=False):
        for sampled in continue_texts(
            model.decoder,
            prompts,
            context=contexts,
            eos_id=eos_id,
            sampling=greedy,
            max_tokens=max_tokens,
            seed=0,
            rules=Rules(grammar=grammar),
        ):
            for item in sampled:
                answers[item.prompt].logprob += item.logprob
                answers[item.prompt].tokens.append(item.token)
    for answer in answers:
        answer.text = tokenizer.decode(answer.tokens).strip()
    remaining = iter(answers)
    return [[next(remaining) for _ in image_prompts] for image_prompts in questions]


def room_for_prompt(model: VisionLanguageModel, max_tokens: int) -> int:
    """Returns the most tokens of a question that leave room for an answer."""
    return max(1, model.decoder.max_len - 1 - max_tokens)


ImageWithQuestions = tuple[ImageSource, list[str]]  # an image and the questions about it
ImagesWithQuestions = tuple[tuple[ImageSource, ...], list[str]]  # images that are read together


class ImageQuestionAnswerer(
    BatchPredictor[ImagesWithQuestions, tuple[Tensor, list[str]], list[ImageAnswer], QuestionOptions],
    ImageTextPredictor,
):
    """Answers questions about each image; arguments as in Predictor.

    A model trained on several images per record takes that many consecutive images for each answer.
    """

    result = ImageAnswer
    returns = "An ImageAnswer; with a list of questions, a list of them"
    task = "image_questions"
    fields = ("image", "question", "answer")
    options = QuestionOptions
    arguments = ImageFileArguments
    stored: ClassVar[Stored] = {"max_tokens": int, "decoding": check_stored_decoding}
    max_tokens: int
    decoding: DecodingDefaults = DecodingDefaults()

    def prompt(self, question: str) -> list[int]:
        """Returns token ids of a question; its beginning is cut off if it leaves no room for an answer."""
        room = room_for_prompt(self.model, self.max_tokens)
        if self.form is None:
            return question_prompt(self.tokenizer, question, room)
        return self.form.conversation(self.tokenizer, [Turn("user", question)]).tokens[-room:]

    @property
    def images(self) -> int:
        """Number of images that the model reads together."""
        return getattr(self.model.encoder, "count", 1)

    def sources(self, inputs: Sequence[ImageSource], options: QuestionOptions) -> list[ImagesWithQuestions]:
        questions = list_questions(options.question)
        if len(inputs) % self.images:
            at_once = f"this model reads {self.images} at once"
            raise UserError(f"images: {len(inputs)} images; {at_once}, so give a multiple of that")
        starts = range(0, len(inputs), self.images)
        return [(tuple(inputs[at : at + self.images]), questions) for at in starts]

    def prepare(self, source: ImagesWithQuestions, options: QuestionOptions) -> tuple[Tensor, list[str]]:
        images, questions = source
        pixels = torch.stack([self.pixels(open_image(image)) for image in images])
        return pixels.squeeze(0), questions  # (3, H, W), or (K, 3, H, W) for a model that reads several

    def predict(self, batch: Sequence[tuple[Tensor, list[str]]], options: QuestionOptions) -> list[list[ImageAnswer]]:
        pixels, questions = zip(*batch, strict=True)
        context = encode_pixels(self.model, self.preprocess, torch.stack(pixels).to(self.device))
        prompts = [[self.prompt(question) for question in image_questions] for image_questions in questions]
        return answer_questions(
            self.model,
            self.tokenizer,
            context,
            prompts,
            max_tokens=self.max_tokens,
            grammar=self.build_grammar(options),
        )

    def build_grammar(self, options: QuestionOptions) -> Grammar | None:
        """Returns what answers match, if anything."""
        return options.build_grammar(self.tokenizer, [self.tokenizer.eos_id], removed="any")

    def check_options(self, options: QuestionOptions) -> None:
        self.build_grammar(options)

    def answer(self, result: list[ImageAnswer], options: QuestionOptions) -> ImageAnswer | list[ImageAnswer]:
        return result[0] if isinstance(options.question, str) else result

    def name_of(self, source: ImagesWithQuestions) -> str:
        return " ".join(map(str, source[0]))

    def record(
        self, source: ImagesWithQuestions, result: list[ImageAnswer], options: QuestionOptions, *, form: str = "jsonl"
    ) -> Rows:
        image = {"image": self.name_of(source)}
        return [
            {**image, "question": question, "answer": reply.text, "logprob": reply.logprob}
            for question, reply in zip(source[1], result, strict=True)
        ]

    def notes(self, sources: Sequence[ImagesWithQuestions], options: QuestionOptions) -> Iterator[str | UserError]:
        lengths = [len(self.tokenizer.encode(question)) for question in list_questions(options.question)]
        room = room_for_prompt(self.model, self.max_tokens)
        yield from note_truncation(lengths, room, names="questions", part="beginning")

    def width(self, options: QuestionOptions) -> int:
        return len(list_questions(options.question))


class PromptedAnswerer(ImageWriter):
    """Answers questions about each image with one prompt per question; arguments as in Predictor."""

    returns = "A Text; with results=N, a list of N, the best first; with a list of questions, a list of these"
    task = "captioning"
    fields = ("image", "question", "answer")
    names = ("image", "answer")
    options = PromptedQuestionOptions
    arguments = ImageFileArguments

    def check_options(self, options: Any) -> None:
        super().check_options(options)
        if self.form is None:
            raise UserError("this model writes captions and cannot answer questions; use `vlm caption`")
        if options.trace is not None:
            raise UserError("--trace: is for captions, one tree per image; leave it out")
        if (prompt := single_prompt(options.prompt)) is not None and "{}" not in prompt:
            raise UserError("--prompt must contain {} as a placeholder for the question")

    def sources(self, inputs: Sequence[ImageSource], options: PromptedQuestionOptions) -> list[ImageWithQuestions]:
        questions = list_questions(options.question)
        return [(image, questions) for image in inputs]

    def prepare(self, source: ImageWithQuestions, options: PromptedQuestionOptions) -> list[ImagePrompt]:
        image, questions = source
        return self.build_prompts(image, options, *questions)

    def results(  # type: ignore[override]  # a list for each question of an image
        self,
        batches: Iterable[Sequence[Sequence[ImagePrompt]] | None],
        options: PromptedQuestionOptions,
        *,
        watch: Watch | None = None,
    ) -> Iterator[tuple[int, list[list[Text]]]]:
        """Yields the answers to all questions about an image, in their order, when all are complete."""
        owners, missing, answers = list[int](), dict[int, int](), dict[int, list[Text]]()

        def prompts() -> Iterator[Sequence[ImagePrompt] | None]:
            for batch in batches:
                for image_prompts in batch or ():
                    missing[len(missing)] = len(image_prompts)
                    owners.extend([len(missing) - 1] * len(image_prompts))
                yield None if batch is None else [prompt for image_prompts in batch for prompt in image_prompts]

        watch_image = None if watch is None else lambda place, texts: watch(owners[place], texts)
        for place, texts in super().results(prompts(), options, watch=watch_image):
            answers[place], owner = texts, owners[place]
            missing[owner] -= 1
            if not missing[owner]:
                first = owners.index(owner)
                yield owner, [answers.pop(index) for index in range(first, first + owners.count(owner))]

    def answer(self, result: list[list[Text]], options: Any) -> Any:  # type: ignore[override]
        answers = [best_or_list(texts, options) for texts in result]
        return answers[0] if isinstance(options.question, str) else answers

    def counts(self, result: list[list[Text]]) -> list[int]:
        return [len(texts) for texts in result]

    def name_of(self, source: ImageWithQuestions) -> str:
        return str(source[0])

    def record(  # type: ignore[override]  # a list for each question of an image
        self,
        source: ImageWithQuestions,
        result: list[list[Text]],
        options: PromptedQuestionOptions,
        *,
        form: str = "jsonl",
    ) -> Rows:
        rows = []
        for question, texts in zip(source[1], result, strict=True):
            for row in super().record(source, texts, options, form=form):
                image, *columns = row.items()
                rows.append(dict([image, ("question", question), *columns]))
        return rows
