"""Conversations: turns of a user and of a model, and the forms in which models read them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from vlm.errors import UserError

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")
BEGIN, END = "bos", "eos"  # in a plain form, the tokenizer's own tokens


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    Args:
        role: system, user or assistant; the assistant is the model.
        text: Its text, without its images.
        places: The place of each image, in order: the number of characters of the text before it.
    """

    role: Role
    text: str
    places: tuple[int, ...] = ()

    @property
    def num_images(self) -> int:
        return len(self.places)

    def parts(self) -> Iterator[str | None]:
        """Yields its texts, none of them empty, and None for each image, in order."""
        begin = 0
        for place in self.places:
            if place > begin:
                yield self.text[begin:place]
                begin = place
            yield None
        if begin < len(self.text):
            yield self.text[begin:]


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
        first = sum(place == 0 for place in turn.places)
        yield from self._images(first)
        if not turn.places:
            yield Piece(self.bare, generated=generated, mark=True)
        yield Piece(opening + self.before, generated=generated, mark=True)
        if turn.num_images == first:
            yield Piece(turn.text.strip() if self.trimmed else turn.text, generated=generated)
        else:
            for part in replace(turn, places=turn.places[first:]).parts():
                yield from self._images(1) if part is None else [Piece(part)]
        yield Piece(self.end, generated=generated, mark=True)
        yield Piece(self.after, mark=True)

    def _images(self, count: int) -> Iterator[Piece]:
        for _ in range(count):
            yield Piece(self.image[0], mark=True)
            yield Piece(None)
            yield Piece(self.image[1], mark=True)


# The form of models trained on conversations by vlm: each turn ends with the end token, an answer begins with the begin
# token.
PLAIN = ChatForm(heads={"system": "", "user": "", "assistant": BEGIN}, answer=BEGIN, end=END, plain=True)
