"""The tasks of vlm: the class that uses a model of each, and its commands. Nothing is imported before it is used."""

import importlib
from dataclasses import dataclass
from typing import Any

ANSWER_IMAGES = "Answer questions about images: one line an image and question, PATH<TAB>QUESTION<TAB>ANSWER."
ANSWER_TEXTS = "Answer questions about text files by a part of them: PATH<TAB>QUESTION<TAB>ANSWER."
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
        name: Its name on the command line.
        help: Its line in --help.
        function: "module:name" of the function whose parameters are its options.
    """

    name: str
    help: str
    function: str


@dataclass(frozen=True)
class Task:
    """A task.

    Args:
        predictor: "module:name" of the class that uses a model of it.
        commands: Its commands, the main one first.
    """

    predictor: str
    commands: tuple[Command, ...]


def _task(predictor: str, name: str, help: str, *more: Command) -> Task:
    module = predictor.partition(":")[0]
    return Task(predictor, (Command(name, help, f"{module}:command"), *more))


TASKS = {
    "captioning": _task("vlm.tasks.captioning.predict:Captioner", "caption", CAPTION),
    "classification": _task("vlm.tasks.classification.predict:ImageClassifier", "classify", CLASSIFY),
    "contrastive": _task(
        "vlm.tasks.contrastive.predict:DualClassifier",
        "classify",
        CLASSIFY,
        Command("retrieve", RETRIEVE, "vlm.tasks.contrastive.predict:retrieve"),
    ),
    "image_questions": _task("vlm.tasks.image_questions.predict:Answerer", "answer", ANSWER_IMAGES),
    "language_modeling": _task("vlm.tasks.language_modeling.predict:Generator", "generate", GENERATE),
    "masked_language_modeling": _task("vlm.tasks.masked_language_modeling.predict:GapFiller", "fill", FILL),
    "photo_translation": _task("vlm.tasks.photo_translation.predict:PhotoTranslator", "translate", TRANSLATE),
    "span_answering": _task("vlm.tasks.span_answering.predict:SpanAnswerer", "answer", ANSWER_TEXTS),
    "tagging": _task("vlm.tasks.tagging.predict:Tagger", "tag", TAG),
    "text_classification": _task("vlm.tasks.text_classification.predict:TextClassifier", "classify", CLASSIFY),
    "translation": _task("vlm.tasks.translation.predict:Translator", "translate", TRANSLATE),
}


def resolve(path: str) -> Any:
    """What "module:name" names; its module is imported."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def commands_of(task: str) -> list[str]:
    """Names of a task's commands; those of a task of a user's own package: predict."""
    return [command.name for command in TASKS[task].commands] if task in TASKS else ["predict"]


def tasks_of(command: str) -> dict[str, Command]:
    """The tasks that have a command of a name, each with its own."""
    return {task: one for task, entry in TASKS.items() for one in entry.commands if one.name == command}
