"""The field of questions about an image, with answers."""

from collections.abc import Sequence

from vlm.data.batch import IGNORE, Targets, TextRows, next_token_labels, pack
from vlm.data.fields import CaptionField
from vlm.data.records import Question, Record


class QuestionField(CaptionField):
    """All questions of a record packed into a row, each followed by its answer; only answers are predicted.

        begin  what color is the small cross?  red  end
               <------- is only read -------->  <----> is predicted

    Questions are truncated at the beginning if the row would exceed max_len.

    Args:
        others: See CaptionField.
    Shapes:
        TextRows of tokens (B, L), segments (B, L), scored (B, L): answers with end tokens
    """

    needs = ("questions",)

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

    def tokens(self, question: Question) -> tuple[list[int], int]:
        """Token ids of a question and answer with begin and end, and the number of tokens that are not predicted."""
        begin, *asked, _ = self.ids(question.text)
        *answer, end = self.ids(question.answer)[1:]
        answer = [*answer[: self.max_len - 2], end]
        cut = max(0, len(asked) + 1 + len(answer) - self.max_len)
        return [begin, *asked[cut:], *answer], 1 + len(asked[cut:])

    def length(self, record: Record) -> int:
        return sum(len(self.tokens(question)[0]) for question in record["questions"])

    def _row(self, record: Record) -> list[tuple[list[int], int]]:
        return [self.tokens(question) for question in record["questions"]]

    def _rows(self, texts: Sequence[Sequence[tuple[list[int], int]]]) -> TextRows:
        tokens, segments = pack([[ids for ids, _ in row] for row in texts], self.tokenizer.pad_id)
        flags = [[[place >= read for place in range(len(ids))] for ids, read in row] for row in texts]
        scored = pack(flags, 0)[0] == 1
        targets = Targets.of(next_token_labels(tokens.masked_fill(~scored, IGNORE), segments))
        return TextRows(tokens, segments, targets, scored)
