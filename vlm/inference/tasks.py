"""The tasks of vlm: the predictor class and the commands of each. Nothing is imported before it is used."""

import importlib
from dataclasses import dataclass
from typing import Any

from vlm.errors import UserError

ANSWER = "Answer questions about images, or about text files: one line each, PATH<TAB>QUESTION<TAB>ANSWER."
CHAT = "Converse with a model about images, or in words alone: it answers in the terminal, word by word."
CAPTION = 'Caption images: one line an image, PATH<TAB>CAPTION. "-" reads paths from stdin.'
CLASSIFY = "Classify images, or texts: one line each, PATH or TEXT<TAB>CLASS PROBABILITY."
EMBED = "Make vectors of images or texts: an encoder's states, pooled. --out vectors.npy is a matrix."
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
        function: "module:name" of a function that runs the command, if it does more than others.
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
        compared: "module:name" of the function that returns what `vlm compare` compares; None compares only the scores.
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


EMBEDDING = Command("embed", EMBED, "vlm.tasks.embedding.predict:Embedder")


def _task(
    name: str, help: str, predictor: str, *more: Command, function: str | None = None, like: str | None = None
) -> Task:
    """A task whose models have an encoder.

    Args:
        predictor: "module:Class" within vlm.tasks.
        like: The task whose comparison of evaluations it uses.
    """
    compared = like and f"vlm.tasks.{like}.compare:compared"
    return Task(Command(name, help, f"vlm.tasks.{predictor}", function), (*more, EMBEDDING), compared)


_RETRIEVE = Command("retrieve", RETRIEVE, "vlm.tasks.contrastive.predict:ImageRetriever")
_CAPTIONER = ("caption", CAPTION, "captioning.predict:Captioner")
_ANSWERER = Command("answer", ANSWER, "vlm.tasks.image_questions.prompted:PromptedAnswerer")
_CHAT = Command("chat", CHAT, "vlm.tasks.chat.predictor:ChatPredictor", "vlm.tasks.chat.terminal:chat")
_GENERATOR = Command("generate", GENERATE, "vlm.tasks.language_modeling.predict:TextGenerator")
TASKS = {
    "captioning": _task(
        *_CAPTIONER, _ANSWERER, _CHAT, function="vlm.tasks.captioning.predict:caption", like="captioning"
    ),
    "classification": _task("classify", CLASSIFY, "classification.predict:ImageClassifier", like="classification"),
    "contrastive": _task("classify", CLASSIFY, "contrastive.predict:DualClassifier", _RETRIEVE, like="contrastive"),
    "embedding": Task(EMBEDDING),
    "image_questions": _task(
        "answer", ANSWER, "image_questions.predict:ImageQuestionAnswerer", _CHAT, like="image_questions"
    ),
    "language_modeling": Task(_GENERATOR, (_CHAT,)),
    "masked_language_modeling": _task(
        "fill", FILL, "masked_language_modeling.predict:GapFiller", like="masked_language_modeling"
    ),
    "photo_translation": _task("translate", TRANSLATE, "photo_translation.predict:PhotoTranslator", like="translation"),
    "span_answering": _task("answer", ANSWER, "span_answering.predict:SpanAnswerer", like="span_answering"),
    "tagging": _task("tag", TAG, "tagging.predict:Tagger", like="tagging"),
    "text_classification": _task(
        "classify", CLASSIFY, "text_classification.predict:TextClassifier", like="classification"
    ),
    "translation": _task("translate", TRANSLATE, "translation.predict:Translator", like="translation"),
}
# Task names in checkpoints of earlier versions, with the current names.
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


def suggest_commands(task: str, *excluded: str) -> str:
    """Returns the commands of a task for a message, such as "`vlm caption` or `vlm embed`"."""
    return " or ".join(f"`vlm {name}`" for name in commands_of(task) if name not in excluded)


def uses(task: str, predictor: type) -> bool:
    """Returns True if a predictor is that of a command of a task."""
    path = f"{predictor.__module__}:{predictor.__qualname__}"
    return task in TASKS and any(command.predictor == path for command in TASKS[task].commands)


def misused(path: str, held: str, *wanted: str) -> UserError:
    """Returns the error for a model that a command cannot use.

    Args:
        held: Its task.
        wanted: The tasks of the command.
    """
    known = " or ".join(wanted)
    if held == "embedding":
        remedy = f"use `vlm embed`, or train from it: python train.py model=pretrained model.path={path} task=TASK"
        return UserError(f"{path}: holds an encoder alone, not a model for {known}; {remedy}")
    return UserError(f"{path}: holds a model for {held}, not for {known}; use `vlm {commands_of(held)[0]}`")


def tasks_of(command: str) -> dict[str, Command]:
    """Returns the tasks that have a command of this name, each with its command."""
    return {task: one for task, entry in TASKS.items() for one in entry.commands if one.name == command}
