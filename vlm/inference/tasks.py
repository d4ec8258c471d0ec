"""The tasks of vlm: the class that uses a model of each, and its commands. Nothing is imported before it is used."""

import importlib
from dataclasses import dataclass
from typing import Any

ANSWER = "Answer questions about images, or about text files: one line each, PATH<TAB>QUESTION<TAB>ANSWER."
CAPTION = 'Caption images: one line an image, PATH<TAB>CAPTION. "-" reads paths from stdin.'
CLASSIFY = "Classify images, or texts: one line each, PATH or TEXT<TAB>CLASS PROBABILITY."
FILL = 'Fill in the gaps of texts such as "a [MASK] circle": one line a text.'
GENERATE = "Write text that goes on from prompts: token by token as it comes, or the best of a search."
RETRIEVE = "Rank images by a text: one line each, TEXT<TAB>PATH<TAB>SIMILARITY."
TAG = "Tag the words of texts: one line a text, WORD/TAG WORD/TAG ..."
TRANSLATE = "Translate texts: lines of files or of stdin, one translation a line."


@dataclass(frozen=True)
class Command:
    """A command of a task.

    Args:
        name: Its name on the command line; the method of the Python API has the same.
        help: Its line in --help.
        predictor: "module:Class" of the `Predictor`.
        function: "module:name" of a function that runs the command, where it does more than the others.
    """

    name: str
    help: str
    predictor: str
    function: str | None = None


@dataclass(frozen=True)
class Task:
    """A task.

    Args:
        main: Its command.
        more: Further commands that its models have.
        compared: "module:name" of the function that says what `vlm compare` compares; None for the scores alone.
    """

    main: Command
    more: tuple[Command, ...] = ()
    compared: str | None = None

    @property
    def commands(self) -> tuple[Command, ...]:
        return self.main, *self.more

    @property
    def predictor(self) -> str:
        return self.main.predictor


def _task(
    name: str, help: str, predictor: str, *more: Command, function: str | None = None, like: str | None = None
) -> Task:
    """A task whose folder is that of its predictor; evaluations are compared as those of the task `like`."""
    compared = like and f"vlm.tasks.{like}.compare:compared"
    return Task(Command(name, help, f"vlm.tasks.{predictor}", function), more, compared)


_RETRIEVE = Command("retrieve", RETRIEVE, "vlm.tasks.contrastive.predict:ImageRetriever")
_CAPTIONER = ("caption", CAPTION, "captioning.predict:Captioner")
TASKS = {
    "captioning": _task(*_CAPTIONER, function="vlm.tasks.captioning.predict:caption", like="captioning"),
    "classification": _task("classify", CLASSIFY, "classification.predict:ImageClassifier", like="classification"),
    "contrastive": _task("classify", CLASSIFY, "contrastive.predict:DualClassifier", _RETRIEVE, like="contrastive"),
    "image_questions": _task("answer", ANSWER, "image_questions.predict:ImageQuestionAnswerer", like="image_questions"),
    "language_modeling": _task("generate", GENERATE, "language_modeling.predict:TextGenerator"),
    "masked_language_modeling": _task("fill", FILL, "masked_language_modeling.predict:GapFiller"),
    "photo_translation": _task("translate", TRANSLATE, "photo_translation.predict:PhotoTranslator", like="translation"),
    "span_answering": _task("answer", ANSWER, "span_answering.predict:SpanAnswerer", like="span_answering"),
    "tagging": _task("tag", TAG, "tagging.predict:Tagger", like="tagging"),
    "text_classification": _task(
        "classify", CLASSIFY, "text_classification.predict:TextClassifier", like="classification"
    ),
    "translation": _task("translate", TRANSLATE, "translation.predict:Translator", like="translation"),
}
# Names that checkpoints of earlier versions hold, with those of today.
ALIASES: dict[str, str] = {}


def task_name(held: Any) -> str:
    """The current name of a task that a checkpoint names."""
    return ALIASES.get(str(held), str(held))


def resolve(path: str) -> Any:
    """Imports the object of "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def commands_of(task: str) -> tuple[str, ...]:
    """Names of a task's commands; a task of a user's own package has `predict`."""
    return tuple(command.name for command in TASKS[task].commands) if task in TASKS else ("predict",)


def tasks_of(command: str) -> dict[str, Command]:
    """The tasks that have a command of a name, each with its own."""
    return {task: one for task, entry in TASKS.items() for one in entry.commands if one.name == command}
