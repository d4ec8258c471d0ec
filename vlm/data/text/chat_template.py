"""Chat templates of folders: read, rendered in the sandboxed worker, and searched for what the assistant writes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple

from vlm.data.text.conversation import Turn
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError
from vlm.models.pretrained.architecture import IMAGE
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.folder import Folder
from vlm.untrusted.sizes import JsonValue
from vlm.untrusted.templates import MAX_LENGTH, TemplateError, render_template

TEMPLATE = "chat_template"
# Files with templates, in the order in which transformers prefers them, then those that only the other class reads.
_ONLY, _NAMED = f"{TEMPLATE}.jinja", "additional_chat_templates/default.jinja"
_PROCESSOR, _TOKENIZER = ("processor_config.json", f"{TEMPLATE}.json"), "tokenizer_config.json"
OF_TOKENIZERS = (_NAMED, _ONLY, _TOKENIZER, *_PROCESSOR)
OF_PROCESSORS = (*_PROCESSOR, _ONLY, _NAMED, _TOKENIZER)
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MARK = "\ue000answer {}\ue001"  # takes the place of an answer to find it in a rendering
_ANSWER = "a short answer"  # of conversations that show how a template ends an answer


class RewrittenTurnsError(UserError):
    """A template writes earlier turns differently when later ones follow, so that answers cannot be found."""


class RenderedChat(NamedTuple):
    """A conversation as a template wrote it.

    Args:
        text: The text, with IMAGE for each image.
        generated: Beginning and end, in characters, of each part that the assistant writes.
    """

    text: str
    generated: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The chat template of a folder, which formats conversations as transformers' `apply_chat_template` does.

    Args:
        text: The template, a program for Jinja2.
        special_tokens: The special tokens that it may write, by name, such as bos_token.
        images: "parts" if the content of a turn is a list of texts and images, "text" if it is a text with IMAGE for
            each image, and empty for a model without images, whose content is a text.
        date: The date that `strftime_now` returns, as YYYY-MM-DD; None for the current one. Training fixes it, so that
            a run that is resumed later has the same tokens.
    """

    text: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    images: Literal["", "parts", "text"] = ""
    date: str | None = None

    def __post_init__(self) -> None:
        tokens = dict(self.special_tokens) if isinstance(self.special_tokens, Mapping) else {None: None}
        if type(self.text) is not str or len(self.text) > MAX_LENGTH:
            raise ValueError(f"the chat template is not a text of up to {MAX_LENGTH:,} characters")
        if not all(type(text) is str for text in (*tokens, *tokens.values())) or not tokens.keys() <= {*SPECIAL_TOKENS}:
            raise ValueError("the special tokens of the chat template are not texts by name")
        if self.images not in ("", "parts", "text"):
            raise ValueError(f"the chat template's images are {self.images!r:.40}, not parts, text or empty")
        if self.date is not None:
            datetime.strptime(self.date, "%Y-%m-%d")

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "ChatTemplate":
        """Restores a template from its `state`."""
        return cls(**state)

    def state(self) -> dict[str, Any]:
        """The arguments, as plain containers."""
        tokens = dict(self.special_tokens)
        return {"text": self.text, "special_tokens": tokens, "images": self.images, "date": self.date}

    @property
    def marks_generation(self) -> bool:
        """Whether it marks what the assistant writes with {% generation %}."""
        return _GENERATION.search(self.text) is not None

    @property
    def has_thoughts(self) -> bool:
        """Whether it reads the option enable_thinking."""
        return "enable_thinking" in self.text

    def with_date(self, date: str) -> "ChatTemplate":
        """The same template with a fixed date, as YYYY-MM-DD."""
        return replace(self, date=date)

    def render(self, turns: Sequence[Turn], *, answering: bool) -> str:
        """Renders a conversation.

        Args:
            answering: Whether the model answers next.
        Raises:
            UserError: The template refuses the conversation or cannot be rendered.
        """
        return self._render(turns, answering=answering).text

    def find_generated(self, turns: Sequence[Turn]) -> RenderedChat:
        """Renders a whole conversation and finds what the assistant writes, the end of each answer included.

        They are the blocks in {% generation %} if the template has them. Otherwise each answer is what the rendering
        gains when the answer follows its prompt.

        Raises:
            UserError: As in `render`.
            RewrittenTurnsError: The rendering of the first turns is not the beginning of that of all turns.
        """
        if self.marks_generation:
            return self._render(turns, answering=False, spans=True)
        text, spans = self.render(turns, answering=False), []
        for place, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            before = self.render(turns[:place], answering=False)
            answered = self.render(turns[: place + 1], answering=False)
            if not (answered.startswith(before) and text.startswith(answered)):
                raise RewrittenTurnsError(
                    "the chat template writes the beginning of a conversation differently when later turns follow, so "
                    "that the tokens to train on cannot be found; add {% generation %} and {% endgeneration %} around "
                    "the assistant's text in the template"
                )
            prompt = self.render(turns[:place], answering=True)
            # Some prompts end with text that the turn of an answer lacks, such as a line feed in place of a space.
            pairs = enumerate(zip(prompt, answered, strict=False))
            begin = next((at for at, (first, second) in pairs if first != second), min(len(prompt), len(answered)))
            spans.append((begin, len(answered)))
        return RenderedChat(text, tuple(spans))

    def find_answers(self, turns: Sequence[Turn], text: str, *, answering: bool) -> list[tuple[int, int]] | None:
        """Finds the text of each assistant turn in the rendering of a conversation.

        Args:
            text: The rendering.
        Returns:
            Beginning and end of each, in characters; None if the template changes or leaves out one of them.
        """
        answers = [turn.text for turn in turns if turn.role == "assistant"]
        marks = iter(range(len(answers)))
        marked = [replace(turn, text=_MARK.format(next(marks))) if turn.role == "assistant" else turn for turn in turns]
        try:
            rendered = self.render(marked, answering=answering)
        except TemplateError:
            return None
        for texts in (answers, [answer.strip() for answer in answers]):
            spans: list[tuple[int, int]] = []
            written, rest = "", rendered
            for number, answer in enumerate(texts):
                before, mark, rest = rest.partition(_MARK.format(number))
                if not mark:
                    return None
                written += before
                spans.append((len(written), len(written) + len(answer)))
                written += answer
            if written + rest == text:
                return spans
        return None

    def find_end(self) -> str:
        """The text that the template writes after an answer; empty if none can be found."""
        turns = [Turn("user", "a question"), Turn("assistant", _ANSWER)]
        try:
            return self.render(turns, answering=False).rpartition(_ANSWER)[2]
        except TemplateError:
            return ""

    def _render(self, turns: Sequence[Turn], *, answering: bool, spans: bool = False) -> RenderedChat:
        messages: list[JsonValue] = [{"role": turn.role, "content": self._content(turn)} for turn in turns]
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": answering}
        now = None if self.date is None else datetime.strptime(self.date, "%Y-%m-%d")
        return RenderedChat(*render_template(self.text, {**self.special_tokens, **variables}, now=now, spans=spans))

    def _content(self, turn: Turn) -> JsonValue:
        if self.images == "parts":
            # Templates look at the first part, so an empty turn has an empty text.
            parts = [*turn.parts()] or [""]
            return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
        return "".join(f"{IMAGE}\n" if part is None else part for part in turn.parts())


def read_template(folder: Folder, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Reads the chat template of a folder; None if it has none, or no default one.

    Raises:
        UserError: It is too long, or a file has something else in its place.
    """
    if not (found := find_template(folder)):
        return None
    name, text = found
    if len(text) > MAX_LENGTH:
        raise UserError(f"{name}: the chat template has {len(text):,} characters; the maximum is {MAX_LENGTH:,}")
    template = ChatTemplate(text=text, special_tokens=_read_special_tokens(folder, tokenizer))
    if folder.architecture.image is None:
        return template
    parts = replace(template, images="parts")
    try:
        takes_parts = IMAGE in parts.render([Turn("user", "a question", (0,))], answering=True)
    except TemplateError:
        takes_parts = False
    return parts if takes_parts else replace(template, images="text")


def find_template(folder: Folder) -> tuple[str, str] | None:
    """Returns the path and the text of the chat template in the file that transformers prefers.

    The text is empty if the file has several templates and none is the default.
    """
    for name in OF_PROCESSORS if folder.architecture.image is not None else OF_TOKENIZERS:
        if name.endswith(".jinja"):
            template = folder.read_text(name)
        else:
            template = None if (file := folder.read_json(name)) is None else _select_default(file)
        if template is not None:
            return folder.display_path(name), template
    return None


def _select_default(file: Fields) -> str | None:
    """Returns the template in a file, or the one named "default" of several; empty if none has that name.

    Raises:
        UserError: The file has something else in its place.
    """
    stated = file.values.get(TEMPLATE)
    try:
        if isinstance(stated, list):
            stated = {template["name"]: template["template"] for template in stated}
        default = stated.get("default", "") if isinstance(stated, Mapping) else stated
        if default is None or isinstance(default, str):
            return default
    except (KeyError, TypeError):
        pass
    raise file.error(TEMPLATE, 'neither a string nor strings by name such as "default"')


def _read_special_tokens(folder: Folder, tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the special tokens that a folder states, by name; those of the tokenizer if it states none."""
    tokens: dict[str, str] = {}
    stated = [file for name in ("special_tokens_map.json", _TOKENIZER) if (file := folder.read_json(name)) is not None]
    for file in stated:
        for name in SPECIAL_TOKENS:
            value = file.values.get(name)
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str):
                tokens[name] = value
    if not stated:
        tokens = {f"{name}_token": tokenizer.piece(getattr(tokenizer, f"{name}_id")) for name in ("bos", "eos")}
    return tokens
