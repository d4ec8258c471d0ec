"""Answering questions about images with a model that reads them inside its prompts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vlm.errors import UserError
from vlm.inference.arguments import ImageFileArguments
from vlm.inference.command_options import PromptedQuestionOptions
from vlm.inference.options import prompt_of, questions_of
from vlm.inference.predictor import Rows, Watch
from vlm.inference.writing import Text, one_or_list
from vlm.tasks.captioning.predict import ImageWriter, Prompted

Asked = tuple[Any, list[str]]  # an image and the questions about it


class PromptedAnswerer(ImageWriter):
    """Answers questions about each image, each in a prompt of its own; arguments as in Predictor."""

    returns = "A Text; with results=N, a list of N, the best first; with a list of questions, a list of these"
    task = "captioning"
    fields = ("image", "question", "answer")
    names = ("image", "answer")
    options = PromptedQuestionOptions
    arguments = ImageFileArguments

    def check_options(self, options: Any) -> None:
        super().check_options(options)
        if self.form is None:
            raise UserError("this model writes captions and reads no questions; use `vlm caption`")
        if options.trace is not None:
            raise UserError("--trace: is for captions, one tree an image; leave it out")
        if (prompt := prompt_of(options.prompt)) is not None and "{}" not in prompt:
            raise UserError("--prompt must contain {} as a placeholder for the question")

    def sources(self, inputs: Sequence[Any], options: PromptedQuestionOptions) -> list[Asked]:
        questions = questions_of(options.question)
        return [(image, questions) for image in inputs]

    def prepare(self, source: Asked, options: Any) -> list[Prompted]:
        image, questions = source
        return self.prompted(image, options, *questions)

    def results(  # type: ignore[override]  # a list for each question of an image
        self, batches: Iterable[Any], options: Any, *, watch: Watch | None = None
    ) -> Iterator[tuple[int, list[list[Text]]]]:
        """Yields the answers to all questions about an image, in their order, when all are complete."""
        owners, missing, found = list[int](), dict[int, int](), dict[int, list[Text]]()

        def prompts() -> Iterator[Sequence[Prompted] | None]:
            for batch in batches:
                for asked in batch or ():
                    missing[len(missing)] = len(asked)
                    owners.extend([len(missing) - 1] * len(asked))
                yield None if batch is None else [prompt for asked in batch for prompt in asked]

        seen = None if watch is None else lambda place, texts: watch(owners[place], texts)
        for place, texts in super().results(prompts(), options, watch=seen):
            found[place], owner = texts, owners[place]
            missing[owner] -= 1
            if not missing[owner]:
                first = owners.index(owner)
                yield owner, [found.pop(one) for one in range(first, first + owners.count(owner))]

    def answer(self, result: list[list[Text]], options: Any) -> Any:  # type: ignore[override]
        answers = [one_or_list(texts, options) for texts in result]
        return answers[0] if isinstance(options.question, str) else answers

    def counts(self, result: list[list[Text]]) -> list[int]:
        return [len(texts) for texts in result]

    def name_of(self, source: Any) -> str:
        return str(source[0])

    def record(self, source: Asked, result: list[list[Text]], options: Any, *, form: str = "jsonl") -> Rows:
        rows: list[Mapping[str, Any]] = []
        for question, texts in zip(source[1], result, strict=True):
            for row in super().record(source, texts, options, form=form):
                image, *others = row.items()
                rows.append(dict([image, ("question", question), *others]))
        return rows
