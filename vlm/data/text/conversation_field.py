"""The field of conversations about images."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from vlm.data.batch import CaptionRow
from vlm.data.fields import AugmentKey
from vlm.data.records import Question, Record, conversations
from vlm.data.text.conversation import PLAIN, Turn
from vlm.data.text.prompt_form import PromptForm, Rendered
from vlm.data.text.question_field import QuestionField
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import Range
from vlm.randomness import numpy_rng


class ConversationField(QuestionField):
    """The conversations about a record's images, packed into a row; only the assistant's text is predicted.

        what color is the cross?  end  begin  red  end  and the circle?  end  begin  blue  end
                                              <------>                               <------->

    The states of the images precede the row; they count towards its length if the decoder reads them as a part of it. A
    training row holds as many conversations as fit into max_len, others in each epoch; a longer one is truncated.

    Args:
        others: See QuestionField.
    Attributes:
        states: Number of states per image that the decoder reads as a part of the row.
    """

    turns = True
    states = 0

    def __init__(self, *, tokenizer: Tokenizer, max_len: Annotated[int, Range(3)]) -> None:
        super().__init__(tokenizer=tokenizer, max_len=max_len)
        self._long: set[Question] = set()  # truncated conversations

    @property
    def form(self) -> PromptForm:
        """The form of conversations, with images first."""
        return PromptForm(chat=PLAIN, states=self.states, starts=False)

    def state(self) -> dict[str, Any]:
        return super().state() | {"form": self.form.state()}

    def texts_of(self, record: Record) -> Sequence[str]:
        return [words for question in conversations(record["questions"]) for _, words in question.turns]

    def rendered(self, question: Question) -> Rendered:
        """A whole conversation, not truncated."""
        return self.form.turns(self.tokenizer, turns_of(question.turns), answering=False)

    def prompt(self, question: Question, room: int) -> list[int]:
        turns = turns_of([*question.before, ("user", question.text)])
        return self.form.turns(self.tokenizer, turns).tokens[-max(1, room) :]

    def room(self, record: Record) -> int:
        """Maximum number of tokens of a training row."""
        return max(3, self.max_len - self.states * (1 + len(record.open_more)))

    def length(self, record: Record) -> int:
        return min(self.room(record), sum(len(row.tokens) for row in self._row(record)))

    def lengths(self, record: Record) -> list[tuple[str, int]]:
        whole = conversations(record["questions"])
        texts = (" ".join(words for _, words in question.turns) for question in whole)
        return [(text, len(self.rendered(one).tokens)) for text, one in zip(texts, whole, strict=True)]

    def encode(self, record: Record, key: AugmentKey | None) -> CaptionRow:
        if key is None:
            return super().encode(record, key)
        every = self._row(record)
        order = numpy_rng("conversations", *key).permutation(len(every))
        return CaptionRow([*self._fitting([every[at] for at in order], self.room(record))])

    def _fitting(self, rows: Sequence[Rendered], room: int) -> Iterator[Rendered]:
        """Yields the first conversations that fit together; at least one, truncated if needed."""
        left = room
        for place, (ids, own) in enumerate(rows):
            if place and len(ids) > left:
                return
            yield Rendered(ids[:room], own[:room])
            left -= len(ids)

    def _row(self, record: Record) -> list[Any]:
        rows = {question: self.rendered(question) for question in conversations(record["questions"])}
        room = self.room(record)
        self._long |= {question for question, row in rows.items() if len(row.tokens) > room}
        self.truncated = len(self._long)
        return [*rows.values()]


def turns_of(turns: Sequence[tuple[str, str]]) -> list[Turn]:
    """Converts pairs of role and text to turns."""
    return [Turn(role, words) for role, words in turns]  # type: ignore[arg-type]  # a source checks roles
