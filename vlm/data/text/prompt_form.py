"""The form of a model's prompts: an instruction with an image, or a conversation."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, Self

from vlm.data.text.chat_template import ChatTemplate, RenderedChat, find_template, read_template
from vlm.data.text.conversation import BEGIN, END, ChatForm, Piece, Turn
from vlm.data.text.library import JsonTokenizer
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError, excerpt
from vlm.models.context import PLACE
from vlm.models.pretrained.architecture import IMAGE
from vlm.models.pretrained.fields import integer
from vlm.models.pretrained.folder import Folder
from vlm.untrusted.templates import TemplateError

MAX_STATES = 2**16  # maximum number of states per image
ANCHOR = "."  # put before a text so that it is not encoded as the begin of one
Squares = Sequence[tuple[int, int]]  # rows and columns into which each image is cut
TextOrIds = tuple[str | list[int], bool]  # a part of a prompt, and whether the model writes it


class RenderedPrompt(NamedTuple):
    """A prompt as its model reads it.

    Args:
        tokens: Token ids, with PLACE for each state of an image.
        generated: Whether the model writes each token: those of an answer and of its end.
    """

    tokens: list[int]
    generated: list[bool]


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """The form of a model's prompts.

    Args:
        chat: Form of turns: the template of a folder, or a form of ours; None if the model has none.
        states: Number of states per image; 0 for a model without images.
        image_id: Id of the token that represents a state of an image; None if there is no such token.
        before, after: Text before and after the states of an image.
        tile: Text before the states of a square that is cut out of an image, formatted with its row and column.
        starts: Whether prompts begin with the tokenizer's `starts`.
        caption, question: Instructions for a caption and for an answer, the latter with "{}" for the question.
    """

    chat: ChatForm | ChatTemplate | None
    states: int = 0
    image_id: int | None = None
    before: str = ""
    after: str = ""
    tile: str = ""
    starts: bool = True
    caption: str = "Describe this image in one sentence."
    question: str = "{}"

    def __post_init__(self) -> None:
        texts = (self.before, self.after, self.tile, self.caption, self.question)
        if not all(type(text) is str for text in texts) or type(self.states) is not int:
            raise ValueError("the form of its prompts is not one of texts and a number")
        if not 0 <= self.states <= MAX_STATES:
            raise ValueError(f"{self.states} states of an image are not 0 to {MAX_STATES:,}")

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """Restores a form from its `state`."""
        chat = state["chat"]
        if chat is not None:
            chat = ChatTemplate.of(chat) if "text" in chat else ChatForm.of(chat)
        return cls(**{**state, "chat": chat})

    def state(self) -> dict[str, Any]:
        """The arguments, as plain containers."""
        return {**asdict(self), "chat": self.chat and self.chat.state()}

    @property
    def can_chat(self) -> bool:
        """Whether conversations have this form, not only single instructions."""
        return isinstance(self.chat, ChatTemplate) or (self.chat is not None and "assistant" in self.chat.heads)

    @property
    def has_thoughts(self) -> bool:
        """Whether the form of conversations can turn the model's thinking on and off."""
        if isinstance(self.chat, ChatTemplate):
            return self.chat.has_thoughts
        return self.chat is not None and any(self.chat.thoughts)

    def format_example(self) -> str | None:
        """The text of a prompt, with "{}" for the instruction and IMAGE for an image; None if the form is unknown."""
        turn = Turn("user", "{}", (0,) if self.states else ())
        if isinstance(self.chat, ChatTemplate):
            try:
                return self.chat.render([turn], answering=True)
            except TemplateError:
                return None
        if self.chat is None:
            return None
        pieces = self.chat.pieces([turn], answering=True)
        return "".join(IMAGE if piece.text is None else piece.text for piece in pieces)

    def instruction(
        self, tokenizer: Tokenizer, given: str | None, question: str | None = None, squares: Squares = ()
    ) -> RenderedPrompt:
        """The whole prompt for an image and an instruction.

        Args:
            given: An instruction, or the whole prompt if it contains IMAGE; None for the model's own instruction.
            question: Replaces "{}" in it.
            squares: As in `conversation`.
        Raises:
            UserError: The form is unknown and no whole prompt is given, a whole prompt has several images, or a text
                has a special token.
        """
        text = (self.caption if question is None else self.question) if given is None else given
        words = text if question is None else text.replace("{}", question)
        if IMAGE not in text:
            if self.chat is None:
                raise UserError(
                    "--prompt: this model has no chat template, so that the form of its prompts is unknown; give "
                    "a whole one, such as "
                    f"--prompt $'USER: {IMAGE}\\n{'{}' if question is not None else text} ASSISTANT:'"
                )
            return self.conversation(tokenizer, [Turn("user", words, (0,))], squares)
        if (count := words.count(IMAGE)) != 1:
            raise UserError(f"--prompt: has {count} {IMAGE}; give one with {IMAGE} once")
        first, last = (Piece(part, mark=not self.plain) for part in words.split(IMAGE))
        return self._encode(tokenizer, self._parts(tokenizer, [first, Piece(None), last], squares))

    def conversation(
        self,
        tokenizer: Tokenizer,
        turns: Sequence[Turn],
        squares: Squares = (),
        *,
        answers: Sequence[Sequence[int]] = (),
        answering: bool = True,
        continued: bool = False,
        generated: bool = False,
    ) -> RenderedPrompt:
        """A conversation as the model reads it, in training (answering=False, generated=True), evaluation and chat.

        With a ChatTemplate the tokens are those of transformers: its tokenizer encodes the text that
        `apply_chat_template` renders, without further special tokens, and its processor replaces the images.

        Args:
            turns: All turns; with continued=True only those after the answer.
            squares: Rows and columns of each image, in order, if images are cut into squares.
            answers: The tokens of each assistant turn that the model wrote. They replace those of its text, which may
                differ, unless the template changes the text. Only for a template.
            answering: Whether the model answers next.
            continued: Whether these turns follow an answer that the model has just written, without its end. Only for a
                ChatForm; a template formats whole conversations.
            generated: Whether to find the tokens that the assistant writes, which some templates do not support; a
                ChatForm finds them always. Without it, no token of a template counts as generated.
        Raises:
            UserError: The model has no form of conversations, or it lacks a role; images are not supported; a text has
                a special token; the template refuses the conversation, or its answers cannot be found.
        """
        if self.chat is None:
            raise UserError("this model has no chat template")
        if not self.states and any(turn.places for turn in turns):
            raise UserError(
                "images: this model cannot chat about images; use vlm answer if it was trained on image questions"
            )
        if isinstance(self.chat, ChatForm):
            pieces = self.chat.pieces(turns, answering=answering, continued=continued)
            return self._encode(tokenizer, self._parts(tokenizer, pieces, squares), continued=continued)
        assert not continued
        parts = self._template_parts(tokenizer, turns, squares, answers, answering=answering, generated=generated)
        tokens, flags = self._encode(tokenizer, parts)
        begin = [*tokenizer.starts] if self.starts else []
        repeated = len(begin) if begin and tokens[len(begin) :][: len(begin)] == begin else 0  # the template writes it
        return RenderedPrompt(tokens[repeated:], flags[repeated:])

    def _template_parts(
        self,
        tokenizer: Tokenizer,
        turns: Sequence[Turn],
        squares: Squares,
        answers: Sequence[Sequence[int]],
        *,
        answering: bool,
        generated: bool,
    ) -> Iterator[TextOrIds]:
        """Yields the parts of a conversation that the template formats, as `_parts` does."""
        assert isinstance(self.chat, ChatTemplate)
        count = sum(turn.num_images for turn in turns)
        for turn in turns:
            refuse_marks(tokenizer, turn.text)
            if count and IMAGE in turn.text:
                raise UserError(f"{excerpt(turn.text)}: contains {IMAGE}, which represents an image; remove it")
        if generated and not answering:
            chat = self.chat.find_generated(turns)
        else:
            chat = RenderedChat(self.chat.render(turns, answering=answering))
        if (found := chat.text.count(IMAGE) if count else 0) != count:
            raise UserError(f"the chat template writes {found} images for a conversation with {count}; use another one")
        flags = bytearray(len(chat.text))
        for begin, end in chat.generated:
            end = begin + self._find_turn_end(tokenizer, chat.text[begin:end])
            flags[begin:end] = b"\1" * (end - begin)
        images = [match.span() for match in re.finditer(re.escape(IMAGE), chat.text)] if count else []
        written = self.chat.find_answers(turns, chat.text, answering=answering) if answers else None
        replaced: list[tuple[tuple[int, int], Sequence[int] | None]] = [(span, None) for span in images]
        for (begin, end), ids in zip(written or (), answers, strict=False):
            answer = tokenizer.decode(ids)
            space = answer[: len(answer) - len(answer.lstrip())]  # the model may write a space that the template has
            replaced.append(((begin - len(space) * chat.text[:begin].endswith(space), end), ids))
        cut, place = iter(squares), 0
        for (begin, end), tokens in [*sorted(replaced, key=lambda item: item[0]), ((len(chat.text),) * 2, ())]:
            for flag, run in groupby(flags[place:begin]):
                length = len([*run])
                yield chat.text[place : place + length], bool(flag)
                place += length
            if tokens is None:
                rows, columns = next(cut, (0, 0))
                places = [PLACE] * self.states * (1 + rows * columns)
                yield places if self.image_id is None else self._image(rows, columns), False
            elif tokens:
                yield [*tokens], False
            place = end

    def _find_turn_end(self, tokenizer: Tokenizer, text: str) -> int:
        """The number of characters of an answer, with its end, that the model writes: not a line feed after the end."""
        assert isinstance(self.chat, ChatTemplate)
        if self.chat.marks_generation or not (after := self._split_end(tokenizer)[1]):
            return len(text)
        return len(text.removesuffix(after))

    def _split_end(self, tokenizer: Tokenizer) -> tuple[list[int], str]:
        """The token that ends an answer, if there is one, and the text that the template writes after it."""
        assert isinstance(self.chat, ChatTemplate)
        if not isinstance(tokenizer, JsonTokenizer) or not (tail := self.chat.find_end()):
            return [], ""
        ids, spans = tokenizer.encode_spans(tail)
        for id, (_, end) in zip(ids, spans, strict=True):
            if not tokenizer.bytes_of(id):
                return [id], tail[end:]
        return [], tail

    def past(self, tokenizer: Tokenizer, answer: Sequence[int]) -> Sequence[int]:
        """The tokens of an answer in a ChatForm that later turns read: all after its thoughts."""
        close = self.chat.thoughts[1] if isinstance(self.chat, ChatForm) else ""
        if not close or close not in (text := tokenizer.decode(answer)):
            return answer
        words = text.rpartition(close)[2].lstrip("\n")
        # Finds the shortest suffix of tokens that contains the words by bisection: the text shrinks with each token.
        places = range(len(answer) + 1)
        return answer[bisect_right(places, -len(words), key=lambda at: -len(tokenizer.decode(answer[at:]))) - 1 :]

    def _encode(self, tokenizer: Tokenizer, content: Iterable[TextOrIds], *, continued: bool = False) -> RenderedPrompt:
        """Encodes texts, adjacent ones together; arguments as in `conversation`."""
        tokens: list[int] = [] if continued or not self.starts else [*tokenizer.starts]
        generated, first = [False] * len(tokens), len(tokens)
        for is_text, group in groupby(content, lambda part: isinstance(part[0], str)):
            parts: Any = group
            if is_text and self.plain:
                parts = ((tokenizer.encode_located(text), is_generated) for text, is_generated in parts)
            elif is_text:
                begun = len(tokens) > first
                continues = begun if isinstance(self.chat, ChatTemplate) else continued and not begun
                parts = _encode_together(tokenizer, [*parts], continues=continues)
            for ids, is_generated in parts:
                tokens += ids
                generated += [is_generated] * len(ids)
        return RenderedPrompt([PLACE if id == self.image_id else id for id in tokens], generated)

    @property
    def plain(self) -> bool:
        return isinstance(self.chat, ChatForm) and self.chat.plain

    def _parts(self, tokenizer: Tokenizer, pieces: Iterable[Piece], squares: Squares) -> Iterator[TextOrIds]:
        """Yields texts, of which adjacent ones are encoded together, or ids; and whether the model writes them."""
        cut = iter(squares)
        for piece in pieces:
            if piece.text is None:
                rows, columns = next(cut, (0, 0))
                places = [PLACE] * self.states * (1 + rows * columns)
                yield places if self.image_id is None else self._image(rows, columns), False
            elif piece.mark and self.plain:
                yield {BEGIN: [tokenizer.bos_id], END: [tokenizer.eos_id]}.get(piece.text, []), piece.generated
            else:
                if not piece.mark:
                    refuse_marks(tokenizer, piece.text)
                yield piece.text, piece.generated

    def _image(self, rows: int, columns: int) -> str:
        """The text that represents an image in a prompt."""
        states = IMAGE * self.states
        tiles = [[self.tile.format(1 + row, 1 + column) for column in range(columns)] for row in range(rows)]
        cut = "".join("".join(f"{tile}{states}" for tile in row) + "\n" for row in tiles)
        image = f"{self.before}{states}{self.after}"
        return f"{cut}\n{image}" if cut else image

    def ends(self, tokenizer: Tokenizer) -> list[int]:
        """The tokens that end a turn, in addition to the tokenizer's end token."""
        if isinstance(self.chat, ChatTemplate):
            return self._split_end(tokenizer)[0]
        if self.chat is None or self.plain or not self.chat.end:
            return []
        return tokenizer.encode_marked(self.chat.end)[-1:]  # type: ignore[attr-defined]


def reads_images_inside_texts(about: Mapping[str, Any]) -> bool:
    """Returns True if a checkpoint's model reads images inside texts of a folder's form.

    Other models with a form read texts only, or are trained on plain conversations, with images before each.
    """
    return "form" in about and "preprocess" in about and not PromptForm.of(about["form"]).plain


def refuse_marks(tokenizer: Tokenizer, text: str) -> None:
    """Checks that a text contains no special token, which the model would interpret.

    Raises:
        UserError: It contains one.
    """
    if isinstance(tokenizer, JsonTokenizer) and (named := tokenizer.marks(text)):
        raise UserError(f"{excerpt(text)}: contains the special token {named[0]}; remove it")


def _encode_together(
    tokenizer: Any, parts: Sequence[tuple[str, bool]], *, continues: bool
) -> Iterator[tuple[list[int], bool]]:
    """Encodes texts as one; yields each id (in a list) and whether the model writes it.

    Args:
        continues: Whether the texts continue another text.
    """
    text = "".join(part for part, _ in parts)
    generated = bytes(flag for part, flag in parts for _ in part)
    lead = ANCHOR if continues else ""
    ids, spans = tokenizer.encode_spans(lead + text)
    for id, (start, end) in [*zip(ids, spans, strict=True)][len(tokenizer.encode_marked(lead)) :]:
        yield [id], any(generated[max(0, start - len(lead)) : end - len(lead)])


def read_form(folder: Folder, tokenizer: JsonTokenizer, states: int) -> PromptForm:
    """Reads the form of the prompts of a folder whose model reads images, or whose decoder is joined to an encoder.

    In prompts of a joined decoder, whose template formats texts, no token represents a state of an image.

    Args:
        states: Number of states per image.
    Raises:
        UserError: The image token of config.json is not that of the tokenizer.
    """
    chat: ChatForm | ChatTemplate | None = read_template(folder, tokenizer)
    if (image := folder.architecture.image) is None:
        assert isinstance(chat, ChatTemplate)
        return PromptForm(chat=replace(chat, images="text"), states=states, starts=False)
    id = folder.config.read(integer(image.id_name, low=0, high=2**30))
    if [id] != tokenizer.encode_marked(IMAGE):
        raise folder.config.error(image.id_name, f"which is not the {IMAGE} of its tokenizer")
    if find_template(folder) is None and image.form is not None:
        head, rest = image.form.split(IMAGE)  # the prompt of a model that reads a single instruction
        before, after = rest.split("{}")
        chat = ChatForm(heads={"user": head}, before=before, after=after)
    same = {name: getattr(image, name) for name in ("before", "after", "tile", "starts", "caption", "question")}
    return PromptForm(image_id=id, states=states, chat=chat, **same)


def read_text_form(folder: Folder, tokenizer: Tokenizer) -> PromptForm | None:
    """Reads the form of the prompts of a folder whose model reads text only; None if it has no chat template."""
    if not isinstance(tokenizer, JsonTokenizer) or (chat := read_template(folder, tokenizer)) is None:
        return None
    return PromptForm(chat=chat, starts=False)
