"""Prompts of models that read images inside their text.

A folder's chat template is a program, which is never run: the pieces of text that it writes tell which of the forms
known here it is.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vlm.data.text.library import JsonTokenizer
from vlm.errors import UserError
from vlm.models.context import PLACE
from vlm.models.pretrained.architecture import IMAGE
from vlm.models.pretrained.fields import Fields, integer
from vlm.models.pretrained.folder import Folder

# The pieces that a template writes, and the prompt of one image and an instruction that it makes of them.
_TURNS = frozenset({":", ": ", IMAGE, "<end_of_utterance>", "Assistant:", "capitalize"})
_TURN = f"User:{IMAGE}{{}}<end_of_utterance>\nAssistant:"
_CHATML = frozenset({"<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n"})
KNOWN: Mapping[frozenset[str], str] = {
    frozenset({": ", f"{IMAGE}\n", "ASSISTANT:", "upper"}): f"USER: {IMAGE}\n{{}} ASSISTANT:",  # LLaVA 1.5
    _CHATML | {f"{IMAGE}\n"}: f"<|im_start|>user {IMAGE}\n{{}}<|im_end|><|im_start|>assistant\n",  # LLaVA with a Qwen2
    _CHATML | {IMAGE, "\n"}: f"<|im_start|>user {IMAGE}\n{{}}<|im_end|><|im_start|>assistant\n",
    _TURNS | {"<|im_start|>"}: f"<|im_start|>{_TURN}",  # SmolVLM
    _TURNS | {"<|begin_of_text|>"}: f"<|begin_of_text|>{_TURN}",  # Idefics3
}
FILMS = "<video>"
MOST_STATES = 2**16  # of an image
TEMPLATE = "chat_template"
STATED = ("chat_template.json", "processor_config.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """How a model's prompts are written.

    Args:
        image_id: Id of the token that stands for a state of an image.
        states: Number of states of an image.
        before, after: What stands around them.
        tile: What stands before the states of a square that is cut out of it, with its row and column.
        starts: Whether what the tokenizer puts before a text stands before a prompt.
        form: A prompt, with IMAGE and "{}" for the instruction; None for a model whose own form is not known.
        caption, question: Instructions for a caption and for an answer, the latter with "{}" for the question.
    """

    image_id: int
    states: int
    before: str
    after: str
    tile: str
    starts: bool
    form: str | None
    caption: str
    question: str

    def __post_init__(self) -> None:
        texts = (self.before, self.after, self.tile, self.form or "", self.caption, self.question)
        if not all(type(text) is str for text in texts) or type(self.states) is not int:
            raise ValueError("the form of its prompts is not one of texts and a number")
        if not 0 < self.states <= MOST_STATES:
            raise ValueError(f"{self.states} states of an image are not 1 to {MOST_STATES:,}")

    def state(self) -> dict[str, Any]:
        """The arguments, as plain containers."""
        return asdict(self)

    def prompt(self, given: str | None, question: str | None = None) -> str:
        """The whole prompt.

        Args:
            given: An instruction, or the whole prompt, in which IMAGE stands; None for the model's own instruction.
            question: Takes the place of "{}" in it.
        Raises:
            UserError: The form is not known and no whole prompt is given.
        """
        text = (self.caption if question is None else self.question) if given is None else given
        if IMAGE not in text:
            if self.form is None:
                raise UserError(
                    "--prompt: the form of this model's prompts is not among those that are known; give a whole one, "
                    f"such as --prompt $'USER: {IMAGE}\\n{'{}' if question is not None else text} ASSISTANT:'"
                )
            text = self.form.replace("{}", text)
        return text if question is None else text.replace("{}", question)

    def ids(self, tokenizer: JsonTokenizer, prompt: str, *, rows: int = 0, columns: int = 0) -> list[int]:
        """Token ids of a whole prompt, with PLACE for each state of its image.

        Args:
            rows, columns: Squares that the image is cut into, whose states stand before those of the whole.
        Raises:
            UserError: It has no image, or several.
        """
        if prompt.count(IMAGE) != 1:
            raise UserError(f"--prompt: has {prompt.count(IMAGE)} {IMAGE}; give one with {IMAGE} once")
        states = IMAGE * self.states
        tiles = [[self.tile.format(1 + row, 1 + column) for column in range(columns)] for row in range(rows)]
        cut = "".join("".join(f"{tile}{states}" for tile in row) + "\n" for row in tiles)
        whole = f"{self.before}{states}{self.after}"
        shown = prompt.replace(IMAGE, f"{cut}\n{whole}" if cut else whole)
        ids = [*(tokenizer.starts if self.starts else ()), *tokenizer.encode_marked(shown)]
        return [PLACE if id == self.image_id else id for id in ids]


def read_form(folder: Folder, tokenizer: JsonTokenizer, states: int) -> PromptForm:
    """The form of a folder's prompts.

    Raises:
        UserError: Its tokenizer and config.json have different tokens for an image.
    """
    image = folder.architecture.image
    assert image is not None
    id = folder.config.read(integer(image.id_name, low=0, high=2**30))
    if [id] != tokenizer.encode_marked(IMAGE):
        raise folder.config.fault(image.id_name, f"which is not the {IMAGE} of its tokenizer")
    template = _template(folder)
    form = image.form if template is None else KNOWN.get(pieces(template))
    same = {name: getattr(image, name) for name in ("before", "after", "tile", "starts", "caption", "question")}
    return PromptForm(image_id=id, states=states, form=form, **same)


def _template(folder: Folder) -> str | None:
    """The chat template of a folder, wherever it stands."""
    if (text := folder.text(f"{TEMPLATE}.jinja")) is not None:
        return text
    files: Sequence[Fields | None] = [folder.json(name) for name in STATED]
    return next((file.values[TEMPLATE] for file in files if file and isinstance(file.values.get(TEMPLATE), str)), None)


def pieces(template: str) -> frozenset[str]:
    """What a template writes: its text, strings that it prints, and changes to the name of a role.

    Spaces at the ends of its text, and those that it prints alone, do not count.
    """
    template = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
    text = [part.strip() for part in re.split(r"\{[{%].*?[%}]\}", template, flags=re.DOTALL)]
    printed = re.findall(r"\{\{(.*?)\}\}|\{%-?\s*set\s(.*?)%\}", template, flags=re.DOTALL)
    code = re.sub(r"\[\s*(['\"])\w+\1\s*\]", "", " ".join(part for pair in printed for part in pair))
    strings = [one.replace("\\n", "\n") for _, one in re.findall(r"(['\"])(.*?)\1", code, flags=re.DOTALL)]
    roles = re.findall(r"\b(?:upper|lower|capitalize|title|replace|trim)\b", code)
    found = {*text, *(one for one in strings if one != " "), *roles}
    return frozenset(found - {"", FILMS})
