"""The form of a model's prompts: an instruction with an image, or a conversation."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple, Self

from vlm.data.text.conversation import BEGIN, END, ChatForm, Piece, Turn, read_chat
from vlm.data.text.library import JsonTokenizer
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError, excerpt
from vlm.models.context import PLACE
from vlm.models.pretrained.architecture import IMAGE
from vlm.models.pretrained.fields import integer
from vlm.models.pretrained.folder import Folder

MAX_STATES = 2**16  # maximum number of states per image
ANCHOR = "."  # put before a text so that it is not encoded as the begin of one
Squares = Sequence[tuple[int, int]]  # rows and columns into which each image is cut


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
        chat: Form of turns; None if the model's own form is unknown.
        states: Number of states per image; 0 for a model without images.
        image_id: Id of the token that represents a state of an image; None if there is no such token.
        before, after: Text before and after the states of an image.
        tile: Text before the states of a square that is cut out of an image, formatted with its row and column.
        starts: Whether prompts begin with the tokenizer's `starts`.
        caption, question: Instructions for a caption and for an answer, the latter with "{}" for the question.
    """

    chat: ChatForm | None
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
        return cls(**{**state, "chat": None if chat is None else ChatForm.of(chat)})

    def state(self) -> dict[str, Any]:
        """The arguments, as plain containers."""
        return {**asdict(self), "chat": self.chat and self.chat.state()}

    def format_example(self) -> str | None:
        """The text of a prompt, with "{}" for the instruction and IMAGE for an image; None if the form is unknown."""
        if self.chat is None:
            return None
        pieces = self.chat.pieces([Turn("user", "{}", int(self.states > 0))], answering=True)
        return "".join(IMAGE if piece.text is None else piece.text for piece in pieces)

    def prompt(self, given: str | None, question: str | None = None) -> list[Piece]:
        """The whole prompt for an image and an instruction.

        Args:
            given: An instruction, or the whole prompt if it contains IMAGE; None for the model's own instruction.
            question: Replaces "{}" in it.
        Raises:
            UserError: The form is unknown and no whole prompt is given, or a whole prompt has several images.
        """
        text = (self.caption if question is None else self.question) if given is None else given
        words = text if question is None else text.replace("{}", question)
        if IMAGE not in text:
            if self.chat is None:
                raise UserError(
                    "--prompt: the form of this model's prompts is not among those that are known; give a whole one, "
                    f"such as --prompt $'USER: {IMAGE}\\n{'{}' if question is not None else text} ASSISTANT:'"
                )
            return [*self.chat.pieces([Turn("user", words, 1)], answering=True)]
        if (count := words.count(IMAGE)) != 1:
            raise UserError(f"--prompt: has {count} {IMAGE}; give one with {IMAGE} once")
        first, last = (Piece(part, mark=not self.plain) for part in words.split(IMAGE))
        return [first, Piece(None), last]

    def turns(
        self,
        tokenizer: Tokenizer,
        turns: Sequence[Turn],
        squares: Squares = (),
        *,
        answering: bool = True,
        continued: bool = False,
    ) -> RenderedPrompt:
        """A conversation as the model reads it.

        Args:
            squares: Rows and columns of each image, if images are cut into squares.
            answering: Whether the model answers next.
            continued: Whether these turns follow an answer that the model has just written, without its end.
        Raises:
            UserError: The form is unknown or lacks a role, images are not supported, or a text has a special token.
        """
        if self.chat is None:
            raise UserError("the form of this model's conversations is not among those that are known")
        if not self.states and any(turn.images for turn in turns):
            raise UserError(
                "images: this model cannot chat about images; use vlm answer if it was trained on image questions"
            )
        return self.ids(
            tokenizer, self.chat.pieces(turns, answering=answering, continued=continued), squares, continued=continued
        )

    def past(self, tokenizer: Tokenizer, answer: Sequence[int]) -> Sequence[int]:
        """The tokens of an answer that later turns read: all after its thoughts."""
        close = "" if self.chat is None else self.chat.thoughts[1]
        if not close or close not in (text := tokenizer.decode(answer)):
            return answer
        words = text.rpartition(close)[2].lstrip("\n")
        # Finds the shortest suffix of tokens that contains the words by bisection: the text shrinks with each token.
        places = range(len(answer) + 1)
        return answer[bisect_right(places, -len(words), key=lambda at: -len(tokenizer.decode(answer[at:]))) - 1 :]

    def ids(
        self, tokenizer: Tokenizer, pieces: Iterable[Piece], squares: Squares = (), *, continued: bool = False
    ) -> RenderedPrompt:
        """Encodes pieces as the model reads them; arguments as in `turns`."""
        tokens: list[int] = [] if continued or not self.starts else [*tokenizer.starts]
        generated = [False] * len(tokens)
        for is_text, group in groupby(self._parts(tokenizer, pieces, squares), lambda part: isinstance(part[0], str)):
            parts: Any = group
            if is_text and self.plain:
                parts = ((tokenizer.encode(text), is_generated) for text, is_generated in parts)
            elif is_text:
                parts = _encode_together(tokenizer, [*parts], continues=continued and not tokens)
            for ids, is_generated in parts:
                tokens += ids
                generated += [is_generated] * len(ids)
        return RenderedPrompt([PLACE if id == self.image_id else id for id in tokens], generated)

    @property
    def plain(self) -> bool:
        return self.chat is not None and self.chat.plain

    def _parts(
        self, tokenizer: Tokenizer, pieces: Iterable[Piece], squares: Squares
    ) -> Iterator[tuple[str | list[int], bool]]:
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
        if self.chat is None or self.plain or not self.chat.end:
            return []
        return tokenizer.encode_marked(self.chat.end)[-1:]  # type: ignore[attr-defined]


def reads_images_inside_texts(about: Mapping[str, Any]) -> bool:
    """Returns True if a checkpoint's model reads images inside texts; other models with a form read text only."""
    return "form" in about and "preprocess" in about


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
    """Reads the form of the prompts of a folder whose model reads images.

    Raises:
        UserError: The image token of config.json is not that of the tokenizer.
    """
    image = folder.architecture.image
    assert image is not None
    id = folder.config.read(integer(image.id_name, low=0, high=2**30))
    if [id] != tokenizer.encode_marked(IMAGE):
        raise folder.config.error(image.id_name, f"which is not the {IMAGE} of its tokenizer")
    chat, stated = read_chat(folder)
    if not stated and image.form is not None:
        head, rest = image.form.split(IMAGE)  # the prompt of a model that reads a single instruction
        before, after = rest.split("{}")
        chat = ChatForm(heads={"user": head}, before=before, after=after)
    same = {name: getattr(image, name) for name in ("before", "after", "tile", "starts", "caption", "question")}
    return PromptForm(image_id=id, states=states, chat=chat, **same)


def read_text_form(folder: Folder, tokenizer: Tokenizer) -> PromptForm | None:
    """Reads the form of the prompts of a folder whose model reads text only; None if it is missing or unknown."""
    chat, _ = read_chat(folder)
    if chat is None or not isinstance(tokenizer, JsonTokenizer):
        return None
    marks = [text for text in (chat.begin, chat.end) if text]
    if any(len(tokenizer.encode_marked(text)) != 1 for text in marks):
        return None  # the vocabulary lacks the form's tokens
    return PromptForm(chat=chat, starts=False)
