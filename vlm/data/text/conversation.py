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
    """What one side says.

    Args:
        role: system, user or assistant; the last is the model.
        text: Its words.
        images: Number of images that stand before them.
    """

    role: Role
    text: str
    images: int = 0


class Piece(NamedTuple):
    """A piece of a prompt.

    Args:
        text: Its words; None for an image.
        own: Whether the model writes it, as an answer.
        mark: Whether the form writes it, which may name special tokens, and not a person.
    """

    text: str | None
    own: bool = False
    mark: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """How a model's conversations are written: each turn is its head, its images, its text, and an end.

    Args:
        heads: What stands before a turn, by its role; a role that is not here has no turns.
        answer: What stands before a text that the model goes on with.
        end: What ends a turn, which the model writes too.
        after: What stands after an end.
        image: What stands around an image, before and after it.
        bare: What stands in the place of the images of a turn without any.
        before: What stands before a text.
        begin: What stands before all turns.
        system: Words of the system where a conversation does not begin with its own.
        opening: What stands before the words of a system that begins a conversation.
        thoughts: What stands before and after what the model thinks before an answer: the last turn alone shows it.
        trimmed: Whether texts lose the spaces around them.
        plain: Whether head, answer and end are BEGIN, END or nothing, and texts are encoded each for itself: the form
            of a model whose tokenizer has no special tokens of its own for turns.
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
        if not all(type(text) is str for text in (*texts, *heads, *heads.values())) or not (
            len(self.image) == len(self.thoughts) == 2
        ):
            raise ValueError("the form of its conversations is not one of texts")
        if not self.heads.keys() <= {*ROLES} or "user" not in self.heads:
            raise ValueError("the form of its conversations does not name their roles")
        if self.plain and not {self.answer, self.end, *self.heads.values()} <= {"", BEGIN, END}:
            raise ValueError("the plain form of its conversations names other tokens than begin and end")

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "ChatForm":
        """The form of its `state`."""
        return cls(**{**state, **{name: tuple(state[name]) for name in ("image", "thoughts") if name in state}})

    def state(self) -> dict[str, Any]:
        """The arguments, as plain containers."""
        return {**asdict(self), "heads": dict(self.heads), "image": [*self.image], "thoughts": [*self.thoughts]}

    def pieces(self, turns: Sequence[Turn], *, answering: bool, begun: bool = False) -> Iterator[Piece]:
        """The pieces of a conversation.

        Args:
            answering: Whether the model answers next.
            begun: Whether these turns follow an answer that the model has just written.
        Raises:
            UserError: A role has no turns in this form.
        """
        if begun:
            yield Piece(self.end, own=True, mark=True)
            yield Piece(self.after, mark=True)
        else:
            yield Piece(self.begin, mark=True)
            if self.system is not None and not (turns and turns[0].role == "system"):
                turns = [Turn("system", self.system), *turns]
        for place, turn in enumerate(turns):
            opens = turn.role == "system" and not (begun or place)
            yield from self._turn(self._parted(turn, place == len(turns) - 1), self.opening if opens else "")
        if answering:
            yield Piece(self.answer, mark=True)

    def _parted(self, turn: Turn, last: bool) -> Turn:
        """Puts the thoughts of an answer where the form has them: before the last answer; earlier ones lose them."""
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
        head, own = self.heads[turn.role], turn.role == "assistant"
        begins = self.answer if own and head.startswith(self.answer) else head
        yield Piece(begins, mark=True)
        yield Piece(head[len(begins) :], own=own, mark=True)  # the model writes what its prompt lacks, as a space
        for _ in range(turn.images):
            yield Piece(self.image[0], mark=True)
            yield Piece(None)
            yield Piece(self.image[1], mark=True)
        if not turn.images:
            yield Piece(self.bare, own=own, mark=True)
        yield Piece(opening + self.before, own=own, mark=True)
        yield Piece(turn.text.strip() if self.trimmed else turn.text, own=own)
        yield Piece(self.end, own=own, mark=True)
        yield Piece(self.after, mark=True)


# The form of models that learn conversations here: each turn ends with the end token, an answer begins with the begin
# token.
PLAIN = ChatForm(heads={"system": "", "user": "", "assistant": BEGIN}, answer=BEGIN, end=END, plain=True)
