"""Fields of pairs of answers, of which one is preferred: rows hold the chosen and the rejected text of each pair."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from vlm.data.batch import AnswerPairs, CaptionRow, PromptRows, TextRows, choose_for_row
from vlm.data.fields import AugmentKey
from vlm.data.records import Preference, Question, Record, Source, Split, report_error
from vlm.data.text.conversation import Turn
from vlm.data.text.conversation_field import ConversationField, make_turns
from vlm.data.text.prompt_field import CHECKED, Conversation, PromptRow, QuestionPromptField
from vlm.data.text.prompt_form import RenderedPrompt, Squares
from vlm.errors import UserError

NamedPair = tuple[str, Preference]  # a pair and its name, which is unique in its split


def name_pairs(record: Record) -> list[NamedPair]:
    """The pairs of a record, each with a name of the record's id and of its texts."""
    hashes = (blake2b(json.dumps(pair).encode(errors="surrogatepass"), digest_size=8) for pair in record["pairs"])
    return [(f"{record.id}#{digest.hexdigest()}", pair) for digest, pair in zip(hashes, record["pairs"], strict=True)]


def score_last_answer(text: RenderedPrompt) -> RenderedPrompt:
    """A conversation of which only the last answer counts; answers inside the prompt are the same in both texts."""
    flags = text.generated
    end = max((at for at, flag in enumerate(flags) if flag), default=-1) + 1
    begin = max((at for at in range(end) if not flags[at]), default=-1) + 1
    return RenderedPrompt(text.tokens, [begin <= at < end for at in range(len(flags))])


def _choose_pairs(texts: Sequence[RenderedPrompt], room: int, key: AugmentKey) -> list[int]:
    """Indices of the pairs of a training row.

    Args:
        texts: Chosen and rejected text of each pair.
    """
    lengths = [len(text.tokens) for text in texts]
    return choose_for_row([sum(pair) for pair in zip(lengths[::2], lengths[1::2], strict=True)], room, key)


def _texts_of_pairs(texts: Sequence[RenderedPrompt], pairs: Sequence[int]) -> list[RenderedPrompt]:
    return [text for at in pairs for text in texts[2 * at : 2 * at + 2]]


def _with_pairs(rows: Any) -> Any:
    """Rows, and those of their partners, with the pairs of their references."""
    names = [[name for name, _ in row] for row in rows.references]
    partners = None if rows.partners is None else _with_pairs(rows.partners)
    return replace(rows, pairs=AnswerPairs.from_rows(rows, names), partners=partners)


def _checked_records(split: Split) -> Iterator[Record]:
    """The records that are read before training: all, or the first ones of a split with new samples in every epoch."""
    return islice(split.records(), CHECKED if split.fresh else None)


class PreferencePromptField(QuestionPromptField):
    """The pairs of a record as conversations in the form of a folder, each with the chosen and the rejected answer.

    Only the answers are predicted, not earlier turns. Both texts of a pair are in one row, which is therefore up to
    twice as long as max_len.

    Args:
        others: See PromptField; max_len is the maximum number of tokens of a text, and of a row of several pairs.
    Shapes:
        PromptRows as of PromptField, with pairs; references are pairs with their names
    """

    needs = ("pairs",)

    def conversations(self, record: Record) -> list[Conversation]:
        return [
            (*self._prompt(record, pair), Turn("assistant", answer))
            for pair in record["pairs"]
            for answer in (pair.chosen, pair.rejected)
        ]

    def prompts(self, record: Record) -> list[Conversation]:
        return []  # an evaluation scores the given answers

    def references_of(self, record: Record) -> list[Any]:
        return name_pairs(record)

    def texts_of(self, record: Record) -> list[str]:  # type: ignore[override]
        return [text for pair in record["pairs"] for text in pair.texts]

    def render(self, conversation: Conversation, squares: Squares, *, answering: bool = False) -> RenderedPrompt:
        return score_last_answer(super().render(conversation, squares, answering=answering))

    def _prompt(self, record: Record, pair: Preference) -> Conversation:
        if pair.prompt:
            question = Question(pair.prompt[-1][1], "", before=pair.prompt[:-1], image_places=pair.image_places)
            return self._turns(record, question)
        assert self.form is not None
        return (Turn("user", self.form.caption, (0,) * len(self.squares(record))),)

    def encode(self, record: Record, key: AugmentKey | None) -> PromptRow:
        if key is None:
            return super().encode(record, key)
        squares = self.squares(record)
        texts = [self.render(conversation, squares) for conversation in self.conversations(record)]
        pairs, named = _choose_pairs(texts, self.max_len, key), name_pairs(record)
        references = [named[at] for at in pairs]
        return PromptRow(_texts_of_pairs(texts, pairs), self.count_states(squares), references=references)

    def collate(self, values: Sequence[PromptRow]) -> PromptRows:
        return _with_pairs(super().collate(values))


class PreferenceField(ConversationField):
    """The pairs of a record in the form of conversations of `ConversationField`; captions if there is no prompt.

        begin  a red cross  end  begin  a red circle  end
               <-- chosen --->          <-- rejected --->

    Args:
        others: See ConversationField; nothing is truncated.
    Attributes:
        has_prompts: Whether the training pairs have prompts.
    Shapes:
        TextRows as of ConversationField, with pairs; references are pairs with their names
    """

    needs = ("pairs",)
    has_prompts = True

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        super().open(source, splits, seed=seed, cache=cache)
        self._splits = splits
        self.has_prompts = any(pair.prompt for record in _checked_records(splits["train"]) for pair in record["pairs"])

    def prepare(self) -> None:
        """Checks the lengths of all texts.

        Raises:
            UserError: One does not fit; the message names it. Inside `collect_errors`, all such texts are listed.
        """
        super().prepare()
        for split in self._splits.values():
            for record in _checked_records(split):
                try:
                    self._row(record)
                except UserError as fault:
                    report_error(str(fault))

    def state(self) -> dict[str, Any]:
        state = super().state()
        return state if self.has_prompts else {name: value for name, value in state.items() if name != "form"}

    def texts_of(self, record: Record) -> Sequence[str]:
        return [text for pair in record["pairs"] for text in pair.texts]

    def references_of(self, record: Record) -> Sequence[Any]:
        return name_pairs(record)

    def lengths(self, record: Record) -> list[tuple[str, int]]:
        answers = [(pair, answer) for pair in record["pairs"] for answer in (pair.chosen, pair.rejected)]
        texts = [" ".join([*(words for _, words in pair.prompt), answer]) for pair, answer in answers]
        counts = [len(self._render(pair, answer).tokens) for pair, answer in answers]
        return list(zip(texts, counts, strict=True))

    def encode(self, record: Record, key: AugmentKey | None) -> CaptionRow:
        if key is None:
            return super().encode(record, key)
        texts, named = self._row(record), name_pairs(record)
        pairs = _choose_pairs(texts, self.room(record), key)
        return CaptionRow(_texts_of_pairs(texts, pairs), references=[named[at] for at in pairs])

    def _render(self, pair: Preference, answer: str) -> RenderedPrompt:
        turns = [*make_turns(pair.prompt), Turn("assistant", answer)]
        return score_last_answer(self.form.conversation(self.tokenizer, turns, answering=False))

    def _row(self, record: Record) -> list[Any]:
        room, texts = self.room(record), list[RenderedPrompt]()
        for pair in record["pairs"]:
            rendered = [self._render(pair, answer) for answer in (pair.chosen, pair.rejected)]
            if (length := max(len(text.tokens) for text in rendered)) > room:
                needed = length + self.max_len - room
                raise UserError(
                    f"data: {record.id}: a pair of answers has {needed} tokens with its images, more than data.max_len="
                    f"{self.max_len}; set data.max_len={needed}, or shorten it"
                )
            texts += rendered
        return texts

    def collate(self, values: Sequence[CaptionRow]) -> TextRows:
        return _with_pairs(super().collate(values))
