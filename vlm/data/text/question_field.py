"""The field of questions about an image, with answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vlm.data.batch import IGNORE, Targets, TextRows, next_token_labels, pack
from vlm.data.fields import CaptionField
from vlm.data.records import Question, Record, Source, Split
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import UserError


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
        if source.turns and not self.turns:
            raise UserError(
                "data: holds conversations, of which single questions make no sense; use task=conversations"
            )
        super().open(source, splits, seed=seed, cache=cache)

    def texts_of(self, record: Record) -> Sequence[str]:
        return [text for question in record["questions"] for text in (question.text, question.answer)]

    def references_of(self, record: Record) -> Sequence[Question]:
        return list(record["questions"])

    def ids(self, caption: str, language: str | None = None) -> list[int]:
        """Token ids of a question or answer with begin and end, not truncated; cached."""
        if caption not in self._ids:
            ids = self.tokenizer.encode(caption)
            self._ids[caption] = [self.tokenizer.bos_id, *ids, self.tokenizer.eos_id]
        return self._ids[caption]

    def tokens(self, question: Question) -> tuple[list[int], list[bool]]:
        """Token ids of a question and answer with begin and end, and whether each token is predicted."""
        begin, *asked, _ = self.ids(question.text)
        *answer, end = self.ids(question.answer)[1:]
        answer = [*answer[: self.max_len - 2], end]
        asked = [begin, *asked[max(0, len(asked) + 1 + len(answer) - self.max_len) :]]
        return [*asked, *answer], [False] * len(asked) + [True] * len(answer)

    def prompt(self, question: Question, room: int) -> list[int]:
        """Token ids of a question to be answered; if they exceed the room, the beginning is truncated."""
        return question_prompt(self.tokenizer, question.text, room)

    def length(self, record: Record) -> int:
        return sum(len(self.tokens(question)[0]) for question in record["questions"])

    def _row(self, record: Record) -> list[tuple[list[int], list[bool]]]:
        return [self.tokens(question) for question in record["questions"]]

    def _rows(self, texts: Sequence[Sequence[tuple[list[int], list[bool]]]]) -> TextRows:
        tokens, segments = pack([[ids for ids, _ in row] for row in texts], self.tokenizer.pad_id)
        scored = pack([[own for _, own in row] for row in texts], 0)[0] == 1
        targets = Targets.of(next_token_labels(tokens.masked_fill(~scored, IGNORE), segments))
        return TextRows(tokens, segments, targets, scored)


def question_prompt(tokenizer: Tokenizer, question: str, room: int) -> list[int]:
    """Token ids of a question to be answered; if they exceed the room, the beginning is truncated."""
    return [tokenizer.bos_id, *tokenizer.encode(question)[-max(1, room) :]]
