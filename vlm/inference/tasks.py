"""The tasks of vlm, and the commands of each with their options and predictors, which are imported when used."""

import importlib
from dataclasses import dataclass
from typing import Any

from vlm.errors import UserError

HELP = {
    "answer": "Answer questions about images or text files: one line per answer, PATH<TAB>QUESTION<TAB>ANSWER.",
    "chat": "Chat with a model in the terminal, with or without images. Answers are streamed.",
    "caption": 'Caption images: one line per image, PATH<TAB>CAPTION. "-" reads paths from stdin.',
    "classify": "Classify images or texts: one line per input, PATH or TEXT<TAB>CLASS PROBABILITY.",
    "detect": "Detect objects: one line per object, PATH CLASS SCORE LEFT TOP RIGHT BOTTOM, separated by tabs.",
    "draw": "Draw pictures of texts as PNG files: one line per picture, TEXT<TAB>PATH.",
    "embed": "Embed images or texts. With --out FILE.npy, writes a float32 array of shape (inputs, dim).",
    "fill": 'Fill in masked words, such as in "a [MASK] circle": one line per text.',
    "generate": "Continue prompts. Sampled text is streamed; beam search prints the best sequence.",
    "retrieve": "Rank images by similarity to a text: one line per image, TEXT<TAB>PATH<TAB>SIMILARITY.",
    "tag": "Tag the words of texts: one line per text, WORD/TAG WORD/TAG ...",
    "translate": "Translate texts: lines of files or stdin, one translation per line.",
}


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


def _command(name: str, predictor: str, options: str, arguments: str, function: str | None = None) -> Command:
    """A command of a task of vlm; predictor and function are in `vlm.tasks`, the classes in `vlm.inference`."""
    classes = f"vlm.inference.command_options:{options}", f"vlm.inference.arguments:{arguments}"
    return Command(name, HELP[name], f"vlm.tasks.{predictor}", *classes, function and f"vlm.tasks.{function}")


def _task(main: Command, *more: Command, select: str | None = None) -> Task:
    """A task whose models have an encoder.

    Args:
        select: The function that selects what `vlm compare` compares.
    """
    return Task(main, (*more, EMBEDDING), select and f"vlm.tasks.shared.comparison:{select}")


EMBEDDING = _command("embed", "embedding.predict:Embedder", "EmbeddingOptions", "EmbeddingArguments")
_CAPTION = _command(
    "caption", "captioning.predict:Captioner", "CaptionOptions", "ImageArguments", "captioning.command:caption"
)
_ANSWER_IN_PROMPT = _command(
    "answer", "image_questions.predict:PromptedAnswerer", "PromptedQuestionOptions", "ImageFileArguments"
)
_ANSWER_ABOUT_IMAGE = _command(
    "answer", "image_questions.predict:ImageQuestionAnswerer", "QuestionOptions", "ImageFileArguments"
)
_ANSWER_FROM_TEXT = _command("answer", "span_answering.predict:SpanAnswerer", "SpanOptions", "FileArguments")
_CHAT = _command("chat", "chat.predictor:ChatPredictor", "ChatOptions", "WordArguments", "chat.terminal:chat")
_CLASSIFY_IMAGE = _command("classify", "classification.predict:ImageClassifier", "ClassOptions", "ImageArguments")
_CLASSIFY_BY_LABELS = _command("classify", "contrastive.predict:DualClassifier", "LabelOptions", "ImageArguments")
_CLASSIFY_TEXT = _command("classify", "text_classification.predict:TextClassifier", "TextClassOptions", "TextArguments")
_DETECT = _command(
    "detect", "detection.predict:ObjectDetector", "DetectionOptions", "ImageArguments", "detection.command:detect"
)
_DETECT_IN_PROMPT = _command(
    "detect", "detection.predict:PromptedDetector", "DetectionOptions", "ImageArguments", "detection.command:detect"
)
_DRAW = _command(
    "draw", "text_to_image.predict:ImageDrawer", "DrawingOptions", "LineArguments", "text_to_image.command:draw"
)
_RETRIEVE = _command("retrieve", "contrastive.predict:ImageRetriever", "RetrievalOptions", "ImageArguments")
_GENERATE = _command("generate", "language_modeling.predict:TextGenerator", "GenerationOptions", "PromptArguments")
_FILL = _command("fill", "masked_language_modeling.predict:GapFiller", "FillOptions", "MaskedTextArguments")
_TAG = _command("tag", "tagging.predict:Tagger", "TaggingOptions", "TextArguments")
_TRANSLATE = _command("translate", "translation.predict:Translator", "WritingOptions", "LineArguments")
_TRANSLATE_WITH_PHOTO = _command(
    "translate", "photo_translation.predict:PhotoTranslator", "PhotoTranslationOptions", "LineArguments"
)
TASKS = {
    "captioning": _task(_CAPTION, _ANSWER_IN_PROMPT, _DETECT_IN_PROMPT, _CHAT, select="select_captions"),
    "classification": _task(_CLASSIFY_IMAGE, select="select_classes"),
    "contrastive": _task(_CLASSIFY_BY_LABELS, _RETRIEVE, select="select_ranks"),
    "detection": _task(_DETECT, select="select_detections"),
    "embedding": Task(EMBEDDING),
    "image_questions": _task(_ANSWER_ABOUT_IMAGE, _CHAT, select="select_image_answers"),
    "language_modeling": Task(_GENERATE, (_CHAT,)),
    "masked_language_modeling": _task(_FILL, select="select_masked_words"),
    "photo_translation": _task(_TRANSLATE_WITH_PHOTO, select="select_translations"),
    "span_answering": _task(_ANSWER_FROM_TEXT, select="select_span_answers"),
    "tagging": _task(_TAG, select="select_tags"),
    "text_classification": _task(_CLASSIFY_TEXT, select="select_classes"),
    "text_to_image": Task(_DRAW, comparison="vlm.tasks.shared.comparison:select_drawings"),
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
