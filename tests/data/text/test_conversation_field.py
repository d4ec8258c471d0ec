"""Conversations as rows of tokens: only what the assistant says is predicted, as many as fit."""

import torch

from vlm.data.records import Listed, Question, Record
from vlm.data.text.conversation import Turn
from vlm.data.text.conversation_field import ConversationField
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import CharTokenizer
from vlm.models.context import PLACE

FIRST = Question("what?", "red")
SECOND = Question("where?", "two", before=FIRST.turns)
OTHER = Question("how?", "blue")
RECORD = Record("a", {"questions": [FIRST, SECOND, OTHER]})


def field(max_len=99):
    tokenizer = CharTokenizer().fit(["what? where? how? red blue two"])
    return ConversationField(tokenizer=tokenizer, max_len=max_len)


def shown(own, ids):
    pieces = own.tokenizer.piece
    begin, end = pieces(own.tokenizer.bos_id), pieces(own.tokenizer.eos_id)
    return "".join(map(pieces, ids)).replace(begin, "[").replace(end, "]").replace("▁", " ")


def test_a_conversation_of_two_turns_is_one_segment():
    own = field()
    split = own.view("test", Listed([RECORD, RECORD], lambda sample, epoch: sample), training=False)
    rows = own.collate([own.encode(record, None) for record in split.records()])
    assert shown(own, rows.tokens[0].tolist()) == "what?][red]where?][two]how?][blue]"
    assert rows.segments[0].tolist() == [1] * 23 + [2] * 11
    assert "".join(".x"[flag] for flag in rows.scored[0].int()) == ".......xxxx........xxxx......xxxxx"
    assert shown(own, rows.targets.labels.tolist()) == "red]two]blue]" * 2
    assert torch.equal(rows.tokens.flatten()[rows.targets.places + 1], rows.targets.labels)
    assert rows.references[0] == [FIRST, SECOND, OTHER]  # each is answered


def test_the_row_is_what_a_chat_reads_after_the_image():
    own = field()
    own.states = 2
    form = PromptForm.of(own.state()["form"])
    turns = [Turn("user", "what?", images=1), Turn("assistant", "red"), Turn("user", "where?")]
    prompt = form.turns(own.tokenizer, turns).tokens
    assert prompt == [PLACE, PLACE, *own.prompt(SECOND, 99)]
    assert shown(own, own.prompt(SECOND, 99)) == "what?][red]where?]["
    assert own.prompt(SECOND, 4) == own.prompt(SECOND, 99)[-4:]


def test_training_takes_as_many_as_fit_beside_the_images_and_counts_longer_ones():
    own = field(max_len=40)
    length = own.length(RECORD)
    assert length == 34
    assert len(own.encode(RECORD, (0, 0, 0)).texts) == 2
    own.states = 16  # of 40: room for 24
    kept = [own.encode(RECORD, (0, 0, place)).texts for place in range(20)]
    assert {len(texts) for texts in kept} == {1}
    assert {len(texts[0].tokens) for texts in kept} == {23, 11}  # another in another epoch
    assert own.truncated == 0
    own.states = 20
    cut = [own.encode(RECORD, (0, 0, place)).texts[0] for place in range(20)]
    assert {len(ids) for ids, _ in cut} == {20, 11} and own.truncated > 0
