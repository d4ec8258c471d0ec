"""Recognises the chat template of a folder by the text that it writes; the template, a program, is never run."""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from vlm.data.text.conversation import ROLES, ChatForm
from vlm.models.pretrained.architecture import IMAGE
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.folder import Folder

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
    template = _read_template(folder)
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


def _read_template(folder: Folder) -> str | None:
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
