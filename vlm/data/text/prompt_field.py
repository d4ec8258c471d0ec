"""Fields of models that read images inside their texts: captions and conversations in a folder's form of prompts."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import torch

from vlm.data.batch import IGNORE, PromptRows, Targets, choose_for_row, next_token_labels, pack
from vlm.data.fields import AugmentKey, TokenField
from vlm.data.images.image import ImageError, Preprocess
from vlm.data.records import (
    PairedSplit,
    Question,
    Record,
    Source,
    Split,
    report_error,
    select_last_questions,
    select_turns,
)
from vlm.data.text.chat_template import ChatTemplate, RewrittenTurnsError
from vlm.data.text.conversation import Role, Turn
from vlm.data.text.library import JsonTokenizer
from vlm.data.text.prompt_form import PromptForm, RenderedPrompt, Squares, read_form, read_text_form
from vlm.data.text.tokenizer import Tokenizer, tokenizer_from_state
from vlm.errors import Count, Range, UserError
from vlm.models.context import PLACE
from vlm.models.pretrained.load import open_folder

CHECKED = 1000  # records of a split with new samples in every epoch that are checked before training
Conversation = tuple[Turn, ...]


class PromptRow(NamedTuple):
    """The conversations of a sample, rendered, and further values in evaluation.

    Args:
        texts: The conversations, with PLACE for each state of an image.
        num_states: Number of states of the sample's images.
        prompts: Prompts that the model answers in an evaluation: one for captions, or one per question.
        references: Captions or questions for metrics.
        id: Id of the sample.
        sample_index: Index of the sample in its split.
        partner: The texts of the sample's partner with the sample's own images; without texts if the partner has
            another number of images.
    """

    texts: list[RenderedPrompt]
    num_states: int
    prompts: Sequence[Sequence[int]] = ()
    references: Sequence[Any] = ()
    id: str = ""
    sample_index: int | None = None
    partner: "PromptRow | None" = None


class PromptField(TokenField):
    """Base of fields of conversations about a record's images; only the assistant's text is predicted.

    The form of conversations is that of a Hugging Face folder. The conversations of a record are packed into a row and
    do not see one another; each contains the states of the images at their places. A training row holds as many
    conversations as fit into max_len, others in each epoch.

    Args:
        path: The folder; read when a new run begins.
        states: Number of states of an uncut image; None to determine it from the config of the encoder, which
            `build_fields` does.
        preprocess: Preprocessing of the images, which determines the squares that they are cut into; None for a model
            that reads texts only.
        prompt: Instruction, with {} for a question; None for the folder's own.
        others: See TokenField; max_len is the maximum number of tokens of a row, with the states of its images.
    Attributes:
        form: The form of conversations.
    Shapes:
        PromptRows of tokens (B, L), segments (B, L), scored (B, L): the assistant's tokens; image_states (B, L)
    """

    compares = False  # whether training also reads prompts and references, for a task that scores texts

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        max_len: Annotated[int, Range(3)],
        path: str,
        states: Count | None = None,
        preprocess: Preprocess | None,
        prompt: str | None = None,
    ) -> None:
        super().__init__(tokenizer=tokenizer, max_len=max_len)
        self.path, self.states, self.preprocess, self.instruction = path, states, preprocess, prompt
        self.form: PromptForm | None = None
        self._rendered: dict[tuple[Conversation, Squares, bool], tuple[array[int], bytes]] = {}
        self._squares: dict[str, Squares] = {}

    def conversations(self, record: Record) -> list[Conversation]:
        """The conversations of a record, each up to its last answer."""
        raise TypeError(f"{type(self).__name__} does not implement conversations")

    def prompts(self, record: Record) -> list[Conversation]:
        """The conversations that the model answers in an evaluation, each up to a user's turn."""
        raise TypeError(f"{type(self).__name__} does not implement prompts")

    def select_prompts(self, record: Record, chosen: Sequence[int]) -> tuple[list[Conversation], list[Any]]:
        """Returns the prompts of some conversations of a record, and the captions or questions that they ask for.

        Args:
            chosen: Indices of the conversations.
        """
        return self.prompts(record), self.references_of(record)

    def references_of(self, record: Record) -> list[Any]:
        """The captions or questions of a record, for metrics."""
        raise TypeError(f"{type(self).__name__} does not implement references_of")

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        super().open(source, splits, seed=seed, cache=cache)
        self._splits = splits

    def prepare(self) -> None:
        """Reads the form of the folder's prompts, and renders every conversation once.

        Raises:
            UserError: The form is unknown, or a conversation cannot be rendered or does not fit into max_len; the
                message names it. Inside `collect_errors`, such conversations are listed.
        """
        super().prepare()
        self.tokenizer = tokenizer_from_state(self.tokenizer.state())  # the folder's own class, which knows its tokens
        assert isinstance(self.tokenizer, JsonTokenizer)
        folder = open_folder(Path(self.path))
        if self.preprocess is None:
            self.form = read_text_form(folder, self.tokenizer)
        else:
            assert self.states is not None
            self.form = read_form(folder, self.tokenizer, self.states)
        if self.form is None:
            raise UserError(f"{self.path}: has no chat template; put the one of the model into its chat_template.jinja")
        if isinstance(self.form.chat, ChatTemplate):  # a run that is resumed on another day has the same tokens
            self.form = replace(self.form, chat=self.form.chat.with_date(date.today().isoformat()))
        for split in self._splits.values():
            for record in islice(split.records(), CHECKED if split.fresh else None):
                try:
                    for _, length in self.lengths(record):
                        self._check_length(record, length)
                except ImageError:
                    continue  # reported where images are read
                except UserError as fault:
                    named = str(fault).startswith("data: ")
                    report_error(str(fault) if named else f"data: {record.id}: {fault}")

    @property
    def ends(self) -> list[int]:
        """Tokens that end an answer, besides the tokenizer's end token."""
        assert self.form is not None
        return [token for token in self.form.ends(self.tokenizer) if token != self.tokenizer.eos_id]

    def state(self) -> dict[str, Any]:
        assert self.form is not None
        return super().state() | {"form": self.form.state()}

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.form = PromptForm.of(about["form"])
        if self.preprocess is not None:
            self.preprocess = Preprocess.from_state(about["preprocess"])
        self._rendered.clear()
        self._squares.clear()

    def texts_of(self, record: Record) -> Sequence[str]:
        return [turn.text for conversation in self.conversations(record) for turn in conversation]

    def view(self, name: str, split: Split, *, training: bool, limit: int | None = None) -> Split:
        return split if training else PairedSplit(split)

    def squares(self, record: Record) -> Squares:
        """Rows and columns of the squares that each image of a record is cut into; (0, 0) for uncut images."""
        if self.preprocess is None or not self.preprocess.tiles:
            return ((0, 0),) * (("image" in record) + len(record.open_more))
        if record.id not in self._squares:
            self._squares[record.id] = tuple(map(self.preprocess.count_squares, record.image_sizes()))
        return self._squares[record.id]

    def count_states(self, squares: Squares) -> int:
        """Number of states of images that are cut into these squares."""
        assert self.form is not None
        return self.form.states * sum(1 + rows * columns for rows, columns in squares)

    def render(self, conversation: Conversation, squares: Squares, *, answering: bool = False) -> RenderedPrompt:
        """A conversation as the model reads it; cached.

        Args:
            answering: Whether it ends with the user's turn, which the model answers.
        """
        assert self.form is not None
        key = conversation, squares, answering
        if key not in self._rendered:
            rendered = self._render(conversation, squares, answering)
            self._rendered[key] = array("i", rendered.tokens), bytes(rendered.generated)
        ids, flags = self._rendered[key]
        return RenderedPrompt(list(ids), list(map(bool, flags)))

    def _render(self, conversation: Conversation, squares: Squares, answering: bool) -> RenderedPrompt:
        form, tokenizer = self.form, self.tokenizer
        assert form is not None
        if answering:
            return form.conversation(tokenizer, conversation, squares)
        if form.can_chat:
            tokens, generated = form.conversation(tokenizer, conversation, squares, answering=False, generated=True)
            if not form.ends(tokenizer):  # the template ends no answer, as LLaVA's; the model learns to end the last
                count = 1 + max((place for place, flag in enumerate(generated) if flag), default=-1)
                tokens, generated = [*tokens[:count], tokenizer.eos_id], [*generated[:count], True]
            return RenderedPrompt(tokens, generated)
        prompt = form.conversation(tokenizer, conversation[:-1], squares)  # of a model that reads one instruction
        answer = [*tokenizer.encode(conversation[-1].text), tokenizer.eos_id]
        return RenderedPrompt(prompt.tokens + answer, prompt.generated + [True] * len(answer))

    def _render_scored(self, conversation: Conversation, squares: Squares) -> RenderedPrompt:
        """A conversation for an evaluation's loss; if the template rewrites earlier turns, the last answer counts."""
        try:
            return self.render(conversation, squares)
        except RewrittenTurnsError:
            assert self.form is not None
            tokens = self.form.conversation(self.tokenizer, conversation, squares, answering=False).tokens
            prompt = self.render(conversation[:-1], squares, answering=True).tokens
            pairs = enumerate(zip(prompt, tokens, strict=False))
            begin = next((at for at, (first, second) in pairs if first != second), min(len(prompt), len(tokens)))
            return RenderedPrompt(tokens, [False] * begin + [True] * (len(tokens) - begin))

    def _check_length(self, record: Record, length: int) -> None:
        if length > self.max_len:
            raise UserError(
                f"data: {record.id}: a conversation has {length} tokens with its images, more than data.max_len="
                f"{self.max_len}; set data.max_len={length}, or shorten it"
            )

    def length(self, record: Record) -> int:
        squares = self.squares(record)
        lengths = [len(self.render(conversation, squares).tokens) for conversation in self.conversations(record)]
        return min(self.max_len, sum(lengths))

    def lengths(self, record: Record) -> list[tuple[str, int]]:
        """The conversations of a record as text, each with its number of tokens."""
        squares = self.squares(record)
        return [
            (" ".join(turn.text for turn in turns), len(self.render(turns, squares).tokens))
            for turns in self.conversations(record)
        ]

    def encode(self, record: Record, key: AugmentKey | None) -> PromptRow:
        squares = self.squares(record)
        if key is None:
            row = self._evaluation_row(record, squares)
            partner = record["partner"]
            matches = len(self.squares(partner)) == len(squares)
            partner_row = self._evaluation_row(partner, squares) if matches else PromptRow([], row.num_states)
            return row._replace(
                sample_index=record["index"], partner=partner_row._replace(sample_index=record["partner_index"])
            )
        texts = [self.render(conversation, squares) for conversation in self.conversations(record)]
        chosen = choose_for_row([len(text.tokens) for text in texts], self.max_len, key)
        for at in chosen:
            self._check_length(record, len(texts[at].tokens))
        row = PromptRow([texts[at] for at in chosen], self.count_states(squares))
        if not self.compares:
            return row
        turns, references = self.select_prompts(record, chosen)
        prompts = [self.render(conversation, squares, answering=True).tokens for conversation in turns]
        return row._replace(prompts=prompts, references=references, id=record.id)

    def _evaluation_row(self, record: Record, squares: Squares) -> PromptRow:
        texts = [self._render_scored(conversation, squares) for conversation in self.conversations(record)]
        prompts = [self.render(turns, squares, answering=True).tokens for turns in self.prompts(record)]
        return PromptRow(texts, self.count_states(squares), prompts, self.references_of(record), record.id)

    def collate(self, values: Sequence[PromptRow]) -> PromptRows:
        tokens, segments = pack([[text.tokens for text in row.texts] for row in values], self.tokenizer.pad_id)
        scored = pack([[text.generated for text in row.texts] for row in values], 0)[0] == 1
        targets = Targets.from_labels(next_token_labels(tokens.masked_fill(~scored, IGNORE), segments))
        image_states = torch.zeros_like(tokens)
        first = 0
        for index, row in enumerate(values):
            row_places = [token == PLACE for text in row.texts for token in text.tokens]
            count = sum(row_places)
            if count:  # each text has all states of the row's images
                states = torch.arange(first, first + row.num_states).repeat(count // row.num_states)
                image_states[index, : len(row_places)][torch.tensor(row_places)] = states
            first += row.num_states
        partners = [row.partner for row in values if row.partner is not None]
        return PromptRows(
            tokens,
            segments,
            targets,
            scored,
            references=[row.references for row in values],
            ids=[row.id for row in values],
            indices=[row.sample_index for row in values if row.sample_index is not None],
            partners=self.collate(partners) if partners else None,
            image_states=image_states,
            num_states=[row.num_states for row in values],
            prompts=[row.prompts for row in values],
        )


class CaptionPromptField(PromptField):
    """The captions of a record, each as the answer to an instruction.

    Args:
        others: See PromptField.
    """

    needs = ("captions",)
    languages: Sequence[str] = ()

    def conversations(self, record: Record) -> list[Conversation]:
        prompt = self._turns(record)
        return [(*prompt, Turn("assistant", caption)) for caption in record["captions"]]

    def prompts(self, record: Record) -> list[Conversation]:
        return [self._turns(record)]

    def references_of(self, record: Record) -> list[str]:
        return list(record["references"])

    def _turns(self, record: Record) -> Conversation:
        assert self.form is not None
        instruction = self.form.caption if self.instruction is None else self.instruction
        return (Turn("user", instruction, (0,) * len(self.squares(record))),)

    def texts_of(self, record: Record) -> Sequence[str]:
        return record["captions"]


class QuestionPromptField(PromptField):
    """The questions of a record, or its conversations.

    Args:
        others: See PromptField.
    """

    needs = ("questions",)
    turns = True  # questions may refer to earlier turns

    def conversations(self, record: Record) -> list[Conversation]:
        return [
            (*self._turns(record, question), Turn("assistant", question.answer))
            for question in select_last_questions(record["questions"])
        ]

    def prompts(self, record: Record) -> list[Conversation]:
        return [self._turns(record, question) for question in record["questions"]]

    def references_of(self, record: Record) -> list[Question]:
        return list(record["questions"])

    def select_prompts(self, record: Record, chosen: Sequence[int]) -> tuple[list[Conversation], list[Any]]:
        last = select_last_questions(record["questions"])
        questions = select_turns(record["questions"], [last[at] for at in chosen])
        return [self._turns(record, question) for question in questions], questions

    def texts_of(self, record: Record) -> Iterator[str]:  # type: ignore[override]
        for question in select_last_questions(record["questions"]):
            yield from (words for _, words in question.turns)

    def _turns(self, record: Record, question: Question) -> Conversation:
        """The turns up to a question; images come before the first user turn unless the data state their places."""
        assert self.form is not None
        template = self.form.question if self.instruction is None else self.instruction
        if question.before and not self.form.can_chat:
            raise UserError(
                f"data: {record.id}: a conversation has several turns, but this model reads single instructions; "
                "use data of single questions"
            )
        before_question = max(0, template.find("{}"))
        turns, count = list[Turn](), len(self.squares(record))
        for number, (role, words) in enumerate((*question.before, ("user", question.text))):
            if role != "user":
                turns.append(Turn(cast(Role, role), words))  # a source checks roles
                continue
            places = (0,) * count
            if question.image_places:
                places = tuple(place and before_question + place for place in question.image_places[number])
            turns.append(Turn("user", template.replace("{}", words), places))
            count = 0
        return tuple(turns)
