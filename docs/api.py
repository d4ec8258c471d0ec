"""The page on the Python API: python docs/api.py writes docs/api.md from the docstrings."""

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import vlm
from vlm.api import describe_return
from vlm.inference import writing
from vlm.inference.attention.pictures import AttentionPicture
from vlm.inference.options import DecodingOptions, get_options
from vlm.inference.predictor import Predictor
from vlm.inference.tasks import TASKS, import_object
from vlm.tasks.chat.session import Chat
from vlm.tasks.classification import predict as classification
from vlm.tasks.detection import predict as detection
from vlm.tasks.image_questions import predict as image_questions
from vlm.tasks.language_modeling import predict as language_modeling
from vlm.tasks.masked_language_modeling import predict as masked_language_modeling
from vlm.tasks.span_answering import predict as span_answering
from vlm.tasks.tagging import predict as tagging

HEAD = """# The Python API

`python docs/api.py` makes this page from the docstrings. `import vlm` takes milliseconds; torch loads with the first
model. Errors that a user can correct are raised as `vlm.Error`, with the one or two lines that the commands print.
"""
RESULTS = (
    writing.Text,
    classification.Classes,
    detection.DetectedObject,
    language_modeling.Continuation,
    tagging.TaggedWord,
    masked_language_modeling.FilledText,
    image_questions.ImageAnswer,
    span_answering.SpanAnswer,
    AttentionPicture,
)


CHAT = ("say", "stream", "show", "forget", "reset")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name in ("load", "train", "score"):
        parts += entry(f"vlm.{name}", getattr(vlm, name))
    parts += ["## Model\n", describe(vlm.Model)]
    parts += [
        part for name in ("task", "module", "predict", "attention", "chat") for part in entry(name, member(name), 3)
    ]
    for name, task in TASKS.items():
        kinds = {command.name: import_object(command.predictor) for command in task.commands}
        for command, kind in kinds.items():
            parts += method(command, kind, name.replace("_", " ")) if kind.task == name and command != "chat" else []
    parts += ["### Options of decoding\n", options(), "## Chat\n", describe(Chat)]
    parts += [part for name in CHAT for part in entry(f"chat.{name}", getattr(Chat, name), 3)]
    parts += ["## Run\n", describe(vlm.Run)]
    parts += entry("run.evaluate", vlm.Run.evaluate, 3)
    parts.append("## Results\n")
    for kind in RESULTS:
        parts += [f"### {kind.__name__}, of {module_title(kind)}\n", describe(kind)]
    return "\n".join(parts)


def module_title(kind: type) -> str:
    """The task of a result, or the module of one that several tasks share."""
    return kind.__module__.removesuffix(".predict").rpartition(".")[2].replace("_", " ")


def method(name: str, kind: type[Predictor], task: str) -> list[str]:
    """A task's method: what it takes, and its own options in a table."""
    decoding = issubclass(kind.options, DecodingOptions)
    shared = DecodingOptions.__dataclass_fields__ if decoding else {}
    own = [one for one in fields(kind.options) if one.name not in shared]
    declared_options = get_options(kind.options)
    own = [one for one in own if declared_options[one.name].scope != "command"]
    takes = ["inputs", "*"]
    takes += [one.name if one.default is MISSING else f"{one.name}={_format_default(one.default)}" for one in own]
    rows = [f"- `{one.name}`: {declared_options[one.name].help}" for one in own]
    rows += ["- and the options of decoding below"] if decoding else []
    code = textwrap.fill(f"{name}({', '.join(takes + ['**decoding'] * decoding)})", 116, subsequent_indent="    ")
    inputs = describe(kind.arguments)
    return [
        f"### model.{name}, of {task}\n",
        f"```python\n{code}\n```\n",
        describe(kind),
        f"Inputs: {inputs}",
        "\n".join([*rows, ""]),
        textwrap.fill(f"Returns: {describe_return(kind)[0].lower()}{describe_return(kind)[1:]}", 120) + "\n",
    ]


def member(name: str) -> Any:
    found = inspect.getattr_static(vlm.Model, name)
    return found.fget if isinstance(found, property) else found


def entry(name: str, function: Callable[..., Any], depth: int = 2, about: str = "") -> list[str]:
    """A heading, the signature and the text of a function."""
    takes = [str(one).partition(":")[0] for one in signature(function)]
    shown = f"{name.removeprefix('vlm.').removeprefix('model.').removeprefix('run.')}({', '.join(takes)})"
    code = textwrap.fill(shown, 116, subsequent_indent="    ", break_long_words=False)
    head = [f"{'#' * depth} {name}{about}\n"]
    plain = name in ("task", "module")  # properties
    return [*head, *([] if plain else [f"```python\n{code}\n```\n"]), describe(function)]


def signature(function: Callable[..., Any]) -> Iterator[str]:
    star = False
    for name, one in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            star = True
            yield "*"
        star = star or one.kind is inspect.Parameter.VAR_POSITIONAL
        mark = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(one.kind, "")
        yield f"{mark}{name}" + ("" if one.default is inspect.Parameter.empty else f"={_format_default(one.default)}")


def _format_default(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def describe(thing: Any) -> str:
    """A docstring in Markdown: its arguments and the like as lists."""
    lines = []
    for line in (inspect.getdoc(thing) or "").replace("; arguments as in Predictor.", ".").split("\n"):
        if re.fullmatch(r"\w+:", line):
            lines += ["", f"**{line[:-1]}**", ""]
        elif match := re.match(r" {4}(\w[\w, ]*): (.*)", line):
            lines.append(f"- `{match[1]}`: {match[2]}")
        else:
            lines.append(line.replace("    ", "  ", 1))
    return re.sub("\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def options() -> str:
    hints = get_type_hints(DecodingOptions, include_extras=True)
    rows = [
        f"| `{one.name}` | `{one.default}` | {hints[one.name].__metadata__[0].help} |"
        for one in fields(DecodingOptions)
    ]
    return "\n".join(["| option | default | what |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(page())
