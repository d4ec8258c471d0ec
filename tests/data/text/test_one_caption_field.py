"""One caption of an image by its keys in training, all of them end to end in evaluation."""

from collections import Counter

import pytest

from vlm.data.records import Record
from vlm.data.text.one_caption_field import OneCaptionField
from vlm.data.text.tokenizer import ByteTokenizer

CAPTIONS = ["a red circle above a cross", "two shapes on a dark ground", "a cross", "shapes", "a circle and a cross"]


@pytest.fixture
def field():
    return OneCaptionField(tokenizer=ByteTokenizer(), max_len=40)


def record(id="r", captions=CAPTIONS):
    return Record(id, {"captions": captions[:2], "references": captions})


def read(field, row):
    return [field.tokenizer.decode(ids) for ids in row.texts]


def test_training_draws_one_caption_by_seed_epoch_and_id(field):
    drawn = {(seed, epoch, id): read(field, field.encode(record(id), (seed, epoch, 7)))
             for seed in range(2) for epoch in range(40) for id in ("a", "b")}  # fmt: skip
    assert all(len(texts) == 1 for texts in drawn.values())
    counts = Counter(text for (text,) in drawn.values())
    assert set(counts) == set(CAPTIONS[:2]) and min(counts.values()) > 50
    for change in ((1, 0, "a"), (0, 0, "b")):
        assert any(drawn[0, epoch, "a"] != drawn[change[0], epoch, change[2]] for epoch in range(40))
    other_index = read(field, field.encode(record("a"), (0, 5, 8)))
    assert other_index == drawn[0, 5, "a"]  # a row that is added before it changes nothing


def test_evaluation_reads_all_references_and_then_their_words_in_another_order(field):
    row = field.encode(record(), None)
    texts = read(field, row)
    assert row.references == CAPTIONS == texts[:5] and row == field.encode(record(), None)
    assert [Counter(text.split()) for text in texts[5:]] == [Counter(text.split()) for text in CAPTIONS]
    assert texts[5:7] != CAPTIONS[:2]


def test_a_batch_holds_the_place_of_each_captions_first_token(field):
    rows = [field.encode(record(captions=CAPTIONS[:2]), None), field.encode(record(captions=CAPTIONS[2:3]), None)]
    batch = field.collate(rows)
    assert batch.counts == [4, 2] and batch.texts == [CAPTIONS[:2], CAPTIONS[2:3]]
    assert batch.tokens.flatten()[batch.places].tolist() == [field.tokenizer.bos_id] * 6
    assert batch.ids() == [ids for row in rows for ids in row.texts]
    assert len(field.collate([]).places) == 0
