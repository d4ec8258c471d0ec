"""Conversations: turns of a user and of a model, the forms in which models read them, and chat templates.

A chat template is a program. It is never run, but recognised by the text that it writes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple

from vlm.errors import UserError
from vlm.models.pretrained.architecture import IMAGE
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.folder import Folder

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")
BEGIN, END = "bos", "eos"  # in a plain form, the tokenizer's own tokens
MAX_LENGTH = 2**14  # maximum number of characters of a supported template
TEMPLATE = "chat_template"
# Files with templates, in the order in which transformers prefers them, then those that only the other class reads.
_ONLY, _NAMED = f"{TEMPLATE}.jinja", "additional_chat_templates/default.jinja"
_PROCESSOR, _TOKENIZER = ("processor_config.json", f"{TEMPLATE}.json"), "tokenizer_config.json"
OF_TOKENIZERS = (_NAMED, _ONLY, _TOKENIZER, *_PROCESSOR)
OF_PROCESSORS = (*_PROCESSOR, _ONLY, _NAMED, _TOKENIZER)
THINK = ("<think>", "</think>")
TODAY = "%d %b %Y"
SYSTEM = re.compile(r"<\|im_start\|>system\n(.*)<\|im_end\|>\n", re.DOTALL)  # a whole system turn of ChatML


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    Args:
        role: system, user or assistant; the assistant is the model.
        text: Its text.
        images: Number of images before the text.
    """

    role: Role
    text: str
    images: int = 0


class Piece(NamedTuple):
    """A piece of a prompt.

    Args:
        text: The text; None for an image.
        generated: Whether the model writes it, as part of an answer.
        mark: Whether it belongs to the form, not to a user, so that it may contain special tokens.
    """

    text: str | None
    generated: bool = False
    mark: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """The form of a model's conversations: each turn consists of its head, its images, its text, and an end.

    Args:
        heads: Text before a turn, by role; roles that are missing cannot have turns.
        answer: Text before an answer that the model is to write.
        end: Text that ends a turn; the model writes it too.
        after: Text after an end.
        image: Text before and after an image.
        bare: Text that replaces the images in a turn without images.
        before: Text before the text of a turn.
        begin: Text before all turns.
        system: Default system text, if a conversation does not begin with a system turn.
        opening: Text before the text of a system turn that begins a conversation.
        thoughts: Text before and after the model's thoughts that precede an answer; only the last turn keeps them.
        trimmed: Whether white space around texts is removed.
        plain: Whether heads, answer and end are BEGIN, END or empty, and each text is encoded separately; for models
            whose tokenizer has no special tokens for turns.
    """

    heads: Mapping[str, str] = field(default_factory=dict)
    answer: str = ""
    end: str = ""
    after: str = ""
    image: tuple[str, str] = ("", "")
    bare: str = ""
    before: str = ""
    begin: str = ""
    system: str | None = None
    opening: str = ""
    thoughts: tuple[str, str] = ("", "")
    trimmed: bool = False
    plain: bool = False

    def __post_init__(self) -> None:
        texts = [self.answer, self.end, self.after, *self.image, self.bare, self.before, self.begin, self.opening]
        texts += [self.system or "", *self.thoughts]
        heads = dict(self.heads) if isinstance(self.heads, Mapping) else {None: None}
        is_text = all(type(text) is str for text in (*texts, *heads, *heads.values()))
        if not is_text or not len(self.image) == len(self.thoughts) == 2:
            raise ValueError("the form of its conversations is not one of texts")
        if not self.heads.keys() <= {*ROLES} or "user" not in self.heads:
            raise ValueError("the form of its conversations does not name their roles")
        if self.plain and not {self.answer, self.end, *self.heads.values()} <= {"", BEGIN, END}:
            raise ValueError("the plain form of its conversations names other tokens than begin and end")

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "ChatForm":
        """Restores a form from its `state`."""
        return cls(**{**state, **{name: tuple(state[name]) for name in ("image", "thoughts") if name in state}})

    def state(self) -> dict[str, Any]:
        """The arguments, as plain containers."""
        return {**asdict(self), "heads": dict(self.heads), "image": [*self.image], "thoughts": [*self.thoughts]}

    def pieces(self, turns: Sequence[Turn], *, answering: bool, continued: bool = False) -> Iterator[Piece]:
        """The pieces of a conversation.

        Args:
            answering: Whether the model answers next.
            continued: Whether these turns follow an answer that the model has just written.
        Raises:
            UserError: A role has no turns in this form.
        """
        if continued:
            yield Piece(self.end, generated=True, mark=True)
            yield Piece(self.after, mark=True)
        else:
            yield Piece(self.begin, mark=True)
            if self.system is not None and not (turns and turns[0].role == "system"):
                turns = [Turn("system", self.system), *turns]
        for place, turn in enumerate(turns):
            opens = turn.role == "system" and not (continued or place)
            yield from self._turn(self._place_thoughts(turn, place == len(turns) - 1), self.opening if opens else "")
        if answering:
            yield Piece(self.answer, mark=True)

    def _place_thoughts(self, turn: Turn, last: bool) -> Turn:
        """Puts the thoughts of the last answer where the form has them; earlier answers lose their thoughts."""
        first, close = self.thoughts
        if turn.role != "assistant" or not close:
            return turn
        _, thinks, words = turn.text.rpartition(close)
        thought = turn.text.partition(close)[0].rpartition(first)[2].strip("\n") if thinks else ""
        words = words.lstrip("\n") if thinks or last else words
        return replace(turn, text=f"{first}\n{thought}\n{close}\n\n{words}" if last else words)

    def _turn(self, turn: Turn, opening: str) -> Iterator[Piece]:
        if turn.role not in self.heads:
            raise UserError(f"{turn.role}: has no turn in this model's prompts; they have {', '.join(self.heads)}")
        head, generated = self.heads[turn.role], turn.role == "assistant"
        begins = self.answer if generated and head.startswith(self.answer) else head
        yield Piece(begins, mark=True)
        yield Piece(head[len(begins) :], generated=generated, mark=True)  # what its prompt lacks, such as a space
        for _ in range(turn.images):
            yield Piece(self.image[0], mark=True)
            yield Piece(None)
            yield Piece(self.image[1], mark=True)
        if not turn.images:
            yield Piece(self.bare, generated=generated, mark=True)
        yield Piece(opening + self.before, generated=generated, mark=True)
        yield Piece(turn.text.strip() if self.trimmed else turn.text, generated=generated)
        yield Piece(self.end, generated=generated, mark=True)
        yield Piece(self.after, mark=True)


# The form of models trained on conversations by vlm: each turn ends with the end token, an answer begins with the begin
# token.
PLAIN = ChatForm(heads={"system": "", "user": "", "assistant": BEGIN}, answer=BEGIN, end=END, plain=True)


def _make_form(head: str, answer: str, end: str, **form: Any) -> ChatForm:
    """Returns a form whose turns all begin with the same text, in which "{}" is replaced by the role."""
    return ChatForm(heads={role: head.format(role) for role in ROLES}, answer=answer, end=end, **form)


_CHATML_PIECES = frozenset({"<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n"})
_ANSWER, _END = "<|im_start|>assistant\n", "<|im_end|>"
CHATML = _make_form("<|im_start|>{}\n", _ANSWER, _END, after="\n")
_QWEN3_THINKS = {*THINK, "\n<think>\n", "\n</think>\n\n", "<think>\n\n</think>\n\n"}
LLAVA = ChatForm(heads={"user": "USER: ", "assistant": "ASSISTANT: "}, answer="ASSISTANT:", after=" ", image=("", "\n"))
SMOLVLM = ChatForm(
    heads={role: f"{role.capitalize()}:" for role in ROLES},
    answer="Assistant:",
    end="<end_of_utterance>",
    after="\n",
    bare=" ",
    begin="<|im_start|>",
)
_SMOLVLM_PIECES = frozenset({":", ": ", IMAGE, "<end_of_utterance>", "Assistant:", "capitalize"})
_LLAMA3_HEADER = ("<|start_header_id|>", "<|end_header_id|>\n\n")
LLAMA3 = _make_form(
    "{}".join(_LLAMA3_HEADER),
    "assistant".join(_LLAMA3_HEADER),
    "<|eot_id|>",
    begin="<|begin_of_text|>",
    trimmed=True,
)
_LLAMA3_PIECES = frozenset({*_LLAMA3_HEADER, LLAMA3.answer, "<|eot_id|>", "trim", "bos_token"})
_LLAMA31_DATES = ("Cutting Knowledge Date: December 2023\n", "Today Date: ", "26 Jul 2024", "\n\n")
LLAMA31 = replace(LLAMA3, system="", opening="".join(_LLAMA31_DATES))
_LLAMA31_PIECES = _LLAMA3_PIECES | {LLAMA3.heads["system"], *_LLAMA31_DATES}
_GEMMA_ANSWER = "<start_of_turn>model\n"
# Supported forms, by the pieces that their templates write.
FORMS: Mapping[frozenset[str], ChatForm] = {
    frozenset({": ", f"{IMAGE}\n", "ASSISTANT:", "upper"}): LLAVA,  # 1.5
    # LLaVA with a Qwen2, then OneVision.
    _CHATML_PIECES | {f"{IMAGE}\n"}: _make_form("<|im_start|>{} ", _ANSWER, _END, image=("", "\n")),
    _CHATML_PIECES | {IMAGE, "\n"}: _make_form("<|im_start|>{} ", _ANSWER, _END, before="\n"),
    _SMOLVLM_PIECES | {"<|im_start|>"}: SMOLVLM,
    _SMOLVLM_PIECES | {"<|begin_of_text|>"}: replace(SMOLVLM, begin="<|begin_of_text|>"),  # Idefics3
    _CHATML_PIECES | {"\n"}: CHATML,  # SmolLM2, Qwen2
    _CHATML_PIECES | {"\n", "<|im_start|>system\n", "<|im_end|>\n"}: CHATML,  # Qwen2.5, Qwen3
    _LLAMA3_PIECES: LLAMA3,
    _LLAMA31_PIECES: LLAMA31,
    frozenset({"<start_of_turn>", "\n", "<end_of_turn>\n", "model", _GEMMA_ANSWER, "trim", "bos_token"}): ChatForm(
        heads={"user": "<start_of_turn>user\n", "assistant": _GEMMA_ANSWER},
        answer=_GEMMA_ANSWER,
        end="<end_of_turn>",
        after="\n",
        begin="<bos>",
        trimmed=True,
    ),
}


def read_chat(folder: Folder) -> tuple[ChatForm | None, bool]:
    """Returns the form of a folder's conversations, None if it is unknown; and whether the folder has a template."""
    template = read_template(folder)
    if template is None:
        return None, False
    from vlm.data.text.template_pieces import find_pieces  # jinja2 takes long to import

    pieces = find_pieces(template[:MAX_LENGTH])
    systems = [match[1] for piece in pieces if (match := SYSTEM.fullmatch(piece))]
    dated, thinks = TODAY in pieces, {text for text in pieces if any(mark in text for mark in THINK)}
    form = FORMS.get(pieces - {TODAY, *thinks, *(f"<|im_start|>system\n{text}<|im_end|>\n" for text in systems)})
    if form is None or len(template) > MAX_LENGTH or len(systems) > (form is CHATML) or dated > (form is LLAMA31):
        return None, True
    if thinks:
        return (replace(form, thoughts=THINK) if form is CHATML and thinks == _QWEN3_THINKS else None), True
    if dated:
        return replace(form, opening=form.opening.replace(_LLAMA31_DATES[2], datetime.now().strftime(TODAY))), True
    if form is LLAVA and re.search(r"['\"]system['\"]", template):
        return replace(form, heads={**form.heads, "system": ""}), True
    return replace(form, system=systems[0]) if systems else form, True


def read_template(folder: Folder) -> str | None:
    """Reads the chat template from the file that transformers prefers; empty if no template is the default."""
    for name in OF_PROCESSORS if folder.architecture.image is not None else OF_TOKENIZERS:
        if name.endswith(".jinja"):
            template = folder.read_text(name)
        else:
            template = None if (file := folder.read_json(name)) is None else _select_default(file)
        if template is not None:
            return template
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
