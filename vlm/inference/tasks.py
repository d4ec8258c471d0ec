"""The tasks of vlm, and the commands of each with their options and predictors, which are imported when used."""

import importlib
from dataclasses import dataclass
from typing import Any

from vlm.errors import UserError

ANSWER = "Answer questions about images or text files: one line per answer, PATH<TAB>QUESTION<TAB>ANSWER."
CHAT = "Chat with a model in the terminal, with or without images. Answers are streamed."
CAPTION = 'Caption images: one line per image, PATH<TAB>CAPTION. "-" reads paths from stdin.'
CLASSIFY = "Classify images or texts: one line per input, PATH or TEXT<TAB>CLASS PROBABILITY."
EMBED = "Embed images or texts. With --out FILE.npy, writes a float32 array of shape (inputs, dim)."
FILL = 'Fill in masked words, such as in "a [MASK] circle": one line per text.'
GENERATE = "Continue prompts. Sampled text is streamed; beam search prints the best sequence."
RETRIEVE = "Rank images by similarity to a text: one line per image, TEXT<TAB>PATH<TAB>SIMILARITY."
TAG = "Tag the words of texts: one line per text, WORD/TAG WORD/TAG ..."
TRANSLATE = "Translate texts: lines of files or stdin, one translation per line."


@dataclass(frozen=True)
class Command:
    """A command of a task.

    Args:
        name: Its name on the command line; the method of the Python API has the same.
        help: Its line in --help.
        predictor: "module:Class" of the `Predictor`.
        options, arguments: "module:Class" of the classes that the predictor has under these names, which are imported
            without torch. `vlm --help` imports none.
        function: "module:name" of the function that runs the command, for commands with options of their own. Its
            module is imported without torch.
    """

    name: str
    help: str
    predictor: str
    options: str
    arguments: str
    function: str | None = None


@dataclass(frozen=True)
class Task:
    """A task.

    Args:
        main: Its command.
        more: Further commands of its models.
        comparison: "module:name" of the function that selects what `vlm compare` compares; None: only the scores.
    """

    main: Command
    more: tuple[Command, ...] = ()
    comparison: str | None = None

    @property
    def commands(self) -> tuple[Command, ...]:
        return self.main, *self.more

    @property
    def predictor(self) -> str:
        return self.main.predictor


def _command(
    name: str, help: str, predictor: str, options: str, arguments: str, function: str | None = None
) -> Command:
    """A command of a task of vlm; predictor and function are in `vlm.tasks`, the classes in `vlm.inference`."""
    classes = f"vlm.inference.{options}", f"vlm.inference.{arguments}"
    return Command(name, help, f"vlm.tasks.{predictor}", *classes, function and f"vlm.tasks.{function}")


def _task(main: Command, *more: Command, select: str | None = None) -> Task:
    """A task whose models have an encoder.

    Args:
        select: The function that selects what `vlm compare` compares.
    """
    return Task(main, (*more, EMBEDDING), select and f"vlm.tasks.shared.comparison:{select}")


EMBEDDING = _command(
    "embed",
    EMBED,
    "embedding.predict:Embedder",
    "command_options:EmbeddingOptions",
    "command_options:EmbeddingArguments",
)
_CAPTION = _command(
    "caption",
    CAPTION,
    "captioning.predict:Captioner",
    "command_options:CaptionOptions",
    "arguments:ImageArguments",
    "captioning.command:caption",
)
_ANSWER_IN_PROMPT = _command(
    "answer",
    ANSWER,
    "image_questions.predict:PromptedAnswerer",
    "command_options:PromptedQuestionOptions",
    "arguments:ImageFileArguments",
)
_ANSWER_ABOUT_IMAGE = _command(
    "answer",
    ANSWER,
    "image_questions.predict:ImageQuestionAnswerer",
    "command_options:QuestionOptions",
    "arguments:ImageFileArguments",
)
_ANSWER_FROM_TEXT = _command(
    "answer",
    ANSWER,
    "span_answering.predict:SpanAnswerer",
    "command_options:SpanOptions",
    "arguments:FileArguments",
)
_CHAT = _command(
    "chat",
    CHAT,
    "chat.predictor:ChatPredictor",
    "command_options:ChatOptions",
    "arguments:WordArguments",
    "chat.terminal:chat",
)
_CLASSIFY_IMAGE = _command(
    "classify",
    CLASSIFY,
    "classification.predict:ImageClassifier",
    "command_options:ClassOptions",
    "arguments:ImageArguments",
)
_CLASSIFY_BY_LABELS = _command(
    "classify",
    CLASSIFY,
    "contrastive.predict:DualClassifier",
    "command_options:LabelOptions",
    "arguments:ImageArguments",
)
_CLASSIFY_TEXT = _command(
    "classify",
    CLASSIFY,
    "text_classification.predict:TextClassifier",
    "command_options:TextClassOptions",
    "arguments:TextArguments",
)
_RETRIEVE = _command(
    "retrieve",
    RETRIEVE,
    "contrastive.predict:ImageRetriever",
    "command_options:RetrievalOptions",
    "arguments:ImageArguments",
)
_GENERATE = _command(
    "generate",
    GENERATE,
    "language_modeling.predict:TextGenerator",
    "command_options:GenerationOptions",
    "command_options:PromptArguments",
)
_FILL = _command(
    "fill",
    FILL,
    "masked_language_modeling.predict:GapFiller",
    "command_options:FillOptions",
    "command_options:MaskedTextArguments",
)
_TAG = _command("tag", TAG, "tagging.predict:Tagger", "command_options:TaggingOptions", "arguments:TextArguments")
_TRANSLATE = _command(
    "translate",
    TRANSLATE,
    "translation.predict:Translator",
    "options:WritingOptions",
    "arguments:LineArguments",
)
_TRANSLATE_WITH_PHOTO = _command(
    "translate",
    TRANSLATE,
    "photo_translation.predict:PhotoTranslator",
    "command_options:PhotoTranslationOptions",
    "arguments:LineArguments",
)
TASKS = {
    "captioning": _task(_CAPTION, _ANSWER_IN_PROMPT, _CHAT, select="select_captions"),
    "classification": _task(_CLASSIFY_IMAGE, select="select_classes"),
    "contrastive": _task(_CLASSIFY_BY_LABELS, _RETRIEVE, select="select_ranks"),
    "embedding": Task(EMBEDDING),
    "image_questions": _task(_ANSWER_ABOUT_IMAGE, _CHAT, select="select_image_answers"),
    "language_modeling": Task(_GENERATE, (_CHAT,)),
    "masked_language_modeling": _task(_FILL, select="select_masked_words"),
    "photo_translation": _task(_TRANSLATE_WITH_PHOTO, select="select_translations"),
    "span_answering": _task(_ANSWER_FROM_TEXT, select="select_span_answers"),
    "tagging": _task(_TAG, select="select_tags"),
    "text_classification": _task(_CLASSIFY_TEXT, select="select_classes"),
    "translation": _task(_TRANSLATE, select="select_translations"),
}
# Task names in checkpoints of earlier versions, with the current names.
ALIASES: dict[str, str] = {}


def current_task_name(held: Any) -> str:
    """Returns the current name of a task, given its name in a checkpoint."""
    return ALIASES.get(str(held), str(held))


def import_object(path: str) -> Any:
    """Imports the object of "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def object_path(kind: type) -> str:
    """Returns the "module:Class" of a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def command_names(task: str) -> tuple[str, ...]:
    """Names of a task's commands; a task of a user's own package has `predict`."""
    return tuple(command.name for command in TASKS[task].commands) if task in TASKS else ("predict",)


def wrong_task_error(path: str, held: str, *wanted: str) -> UserError:
    """Returns the error for a model whose task does not have the command.

    Args:
        held: Its task.
        wanted: The tasks of the command.
    """
    expected = " or ".join(wanted)
    if held == "embedding":
        remedy = f"use `vlm embed`, or train from it: python train.py model=pretrained model.path={path} task=TASK"
        return UserError(f"{path}: contains only an encoder, not a model for {expected}; {remedy}")
    return UserError(f"{path}: contains a model for {held}, not for {expected}; use `vlm {command_names(held)[0]}`")


def commands_by_task(command: str) -> dict[str, Command]:
    """Returns the tasks that have a command of this name, each with its command."""
    return {
        task: command_of_task
        for task, entry in TASKS.items()
        for command_of_task in entry.commands
        if command_of_task.name == command
    }
