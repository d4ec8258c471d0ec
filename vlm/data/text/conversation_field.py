"""Fields of questions and of conversations about images."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from vlm.data.batch import IGNORE, CaptionRow, Targets, TextRows, choose_for_row, next_token_labels, pack
from vlm.data.fields import AugmentKey, CaptionField
from vlm.data.records import Question, Record, Source, Split, select_last_questions, select_turns
from vlm.data.text.conversation import PLAIN, Turn
from vlm.data.text.prompt_form import PromptForm, RenderedPrompt
from vlm.data.text.tokenizer import Tokenizer
from vlm.data.text.tokenizer_base import LOCATION_NAME, MAX_LOCATIONS
from vlm.errors import Range, UserError


class QuestionField(CaptionField):
    """All questions of a record packed into a row, each followed by its answer; only answers are predicted.

        begin  what color is the small cross?  red  end
               <--------- only read --------->  <----> predicted

    Questions are truncated at the beginning if the row would exceed max_len.

    Args:
        others: See CaptionField.
    Shapes:
        TextRows of tokens (B, L), segments (B, L), scored (B, L): answers with end tokens
    """

    needs = ("questions",)
    turns = False  # whether questions may refer to earlier turns

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        """Opens the data.

        Raises:
            UserError: Its questions are turns of conversations, which this field does not support.
        """
        if source.has_turns and not self.turns:
            raise UserError(
                "data: contains conversations, whose questions depend on earlier turns; use task=conversations"
            )
        super().open(source, splits, seed=seed, cache=cache)

    def texts_of(self, record: Record) -> Sequence[str]:
        return [text for question in record["questions"] for text in (question.text, question.answer)]

    def references_of(self, record: Record) -> Sequence[Question]:
        return list(record["questions"])

    def encode_caption(self, caption: str, language: str | None = None) -> list[int]:
        """Token ids of a question or answer with begin and end, not truncated; cached."""
        if caption not in self._ids:
            ids = self.tokenizer.encode_located(caption)
            self._ids[caption] = [self.tokenizer.bos_id, *ids, self.tokenizer.eos_id]
        return self._ids[caption]

    def tokens(self, question: Question) -> tuple[list[int], list[bool]]:
        """Token ids of a question and answer with begin and end, and whether each token is predicted."""
        begin, *prompt, _ = self.encode_caption(question.text)
        *answer, end = self.encode_caption(question.answer)[1:]
        answer = [*answer[: self.max_len - 2], end]
        prompt = [begin, *prompt[max(0, len(prompt) + 1 + len(answer) - self.max_len) :]]
        return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)

    def prompt(self, question: Question, room: int) -> list[int]:
        """Token ids of a question to be answered; if they exceed the room, the beginning is truncated."""
        return question_prompt(self.tokenizer, question.text, room)

    def length(self, record: Record) -> int:
        return sum(len(self.tokens(question)[0]) for question in record["questions"])

    def _row(self, record: Record) -> list[tuple[list[int], list[bool]]]:
        return [self.tokens(question) for question in record["questions"]]

    def _rows(self, texts: Sequence[Sequence[tuple[list[int], list[bool]]]]) -> TextRows:
        tokens, segments = pack([[ids for ids, _ in row] for row in texts], self.tokenizer.pad_id)
        scored = pack([[generated for _, generated in row] for row in texts], 0)[0] == 1
        targets = Targets.from_labels(next_token_labels(tokens.masked_fill(~scored, IGNORE), segments))
        return TextRows(tokens, segments, targets, scored)


def question_prompt(tokenizer: Tokenizer, question: str, room: int) -> list[int]:
    """Token ids of a question to be answered; if they exceed the room, the beginning is truncated."""
    return [tokenizer.bos_id, *tokenizer.encode_located(question)[-max(1, room) :]]


class ConversationField(QuestionField):
    """The conversations about a record's images, packed into a row; only the assistant's text is predicted.

        what color is the cross?  end  begin  red  end  and the circle?  end  begin  blue  end
                                              <------>                               <------->

    The states of the images precede the row; they count towards its length if the decoder reads them as a part of it. A
    training row holds as many conversations as fit into max_len, others in each epoch; a longer one is truncated.

    Args:
        bins: Number of location tokens, whose names in texts, such as <loc0012>, are one token each; None for none.
        others: See QuestionField.
    Attributes:
        states: Number of states per image that the decoder reads as a part of the row.
    """

    turns = True
    states = 0

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        max_len: Annotated[int, Range(3)],
        bins: Annotated[int, Range(2, MAX_LOCATIONS)] | None = None,
    ) -> None:
        super().__init__(tokenizer=tokenizer, max_len=max_len)
        self.bins = bins
        self._long: set[Question] = set()  # truncated conversations

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        """Opens the data.

        Raises:
            UserError: Their texts have boxes of another number of location tokens.
        """
        super().open(source, splits, seed=seed, cache=cache)
        if (bins := getattr(source, "bins", None)) not in (None, self.bins):
            raise UserError(
                f"data.source.bins={bins}: needs as many location tokens; set task.fields.questions.bins={bins}"
            )
        if self.bins is not None:
            self.tokenizer.add_locations(self.bins)

    def texts(self) -> Iterator[str]:
        """Texts to learn a tokenizer from, without names of location tokens."""
        return (text if self.bins is None else LOCATION_NAME.sub(" ", text) for text in super().texts())

    @property
    def form(self) -> PromptForm:
        """The form of conversations, with images first."""
        return PromptForm(chat=PLAIN, states=self.states, starts=False)

    def state(self) -> dict[str, Any]:
        return super().state() | {"form": self.form.state()}

    def texts_of(self, record: Record) -> Sequence[str]:
        return [words for question in select_last_questions(record["questions"]) for _, words in question.turns]

    def render(self, question: Question) -> RenderedPrompt:
        """A whole conversation, not truncated."""
        return self.form.conversation(self.tokenizer, make_turns(question.turns), answering=False)

    def prompt(self, question: Question, room: int) -> list[int]:
        turns = make_turns([*question.before, ("user", question.text)])
        return self.form.conversation(self.tokenizer, turns).tokens[-max(1, room) :]

    def room(self, record: Record) -> int:
        """Maximum number of tokens of a training row."""
        return max(3, self.max_len - self.states * (1 + len(record.open_more)))

    def length(self, record: Record) -> int:
        return min(self.room(record), sum(len(row.tokens) for row in self._row(record)))

    def lengths(self, record: Record) -> list[tuple[str, int]]:
        questions = select_last_questions(record["questions"])
        texts = (" ".join(words for _, words in question.turns) for question in questions)
        return [(text, len(self.render(question).tokens)) for text, question in zip(texts, questions, strict=True)]

    def encode(self, record: Record, key: AugmentKey | None) -> CaptionRow:
        if key is None:
            return super().encode(record, key)
        every = self._row(record)
        # At least one text, truncated if needed.
        chosen = choose_for_row([len(text.tokens) for text in every], self.room(record), key)
        if not self.compares:
            return CaptionRow([every[at] for at in chosen])
        last = [*dict.fromkeys(select_last_questions(record["questions"]))]  # as the rows
        questions = select_turns(record["questions"], [last[at] for at in chosen])
        return CaptionRow([every[at] for at in chosen], questions)

    def _row(self, record: Record) -> list[Any]:
        rows = {question: self.render(question) for question in select_last_questions(record["questions"])}
        room = self.room(record)
        self._long |= {question for question, row in rows.items() if len(row.tokens) > room}
        self.truncated = len(self._long)
        # A decoder may have no positions for what is cut off.
        return [RenderedPrompt(row.tokens[:room], row.generated[:room]) for row in rows.values()]


def make_turns(turns: Sequence[tuple[str, str]]) -> list[Turn]:
    """Converts pairs of role and text to turns."""
    return [Turn(role, words) for role, words in turns]  # type: ignore[arg-type]  # a source checks roles
