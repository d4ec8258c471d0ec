"""Words that are masked: how many, by which keys, what stands in their place, and where they are."""

from collections import Counter

import pytest

from vlm.data.records import Record
from vlm.data.text.inputs import MaskedField
from vlm.data.text.tokenizer import ByteTokenizer
from vlm.errors import UserError

TEXT = " ".join(f"word{n}" for n in range(40))


def field(tokenizer=None, **options):
    made = MaskedField(
        tokenizer=tokenizer or ByteTokenizer(mask=True), **{"max_len": 1000, "whole_words": True} | options
    )
    made.prepare()
    return made


def record(text=TEXT, id="r"):
    return Record(id, {"text": text})


def test_whole_words_are_masked_or_single_tokens_and_labels_are_what_stood_there():
    made = field(share=0.2)
    value = made.encode(record(), None)
    (row,) = value.rows
    ids = [made.tokenizer.bos_id, *made.tokenizer.encode(TEXT), made.tokenizer.eos_id]
    assert len(value.gaps) == 8
    masked = [at for at, id in enumerate(row.ids) if id == made.tokenizer.mask_id]
    assert masked == list(row.places) and [ids[at] for at in masked] == value.labels
    assert all(row.ids[at] == ids[at] for at in set(range(len(ids))) - set(masked))
    words = TEXT.split()
    spelled = "".join(f" {words[at]}" if at else words[at] for at in value.gaps)  # a word with the space before it
    assert made.tokenizer.decode(value.labels) == spelled
    tokens = field(whole_words=False, share=0.1).encode(record(), None)
    assert len(tokens.labels) == round(0.1 * len(TEXT))
    with pytest.raises(UserError, match=r"tokenizer\.mask"):
        field(ByteTokenizer())


def test_in_training_eight_of_ten_are_masked_and_one_is_any_token():
    made, counts = field(share=0.5), Counter()
    for index in range(150):
        value = made.encode(record(), (0, 1, index))
        (row,) = value.rows
        for id, label in zip((row.ids[place] for place in row.places), value.labels, strict=True):
            counts["mask" if id == made.tokenizer.mask_id else "same" if id == label else "other"] += 1
            assert id == made.tokenizer.mask_id or id > 2
    shares = [counts[kind] / counts.total() for kind in ("mask", "same", "other")]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.02)


def test_what_is_masked_is_keyed():
    made = field()
    assert made.encode(record(), (0, 1, 2)) == made.encode(record(), (0, 1, 2)) != made.encode(record(), (0, 2, 2))
    assert made.encode(record(), None) == made.encode(record(), None) != made.encode(record(id="s"), None)


def test_a_long_text_is_read_in_part_in_training_and_whole_in_evaluation():
    made = field(max_len=50)
    parts = [made.encode(record(), (0, 0, index)).rows for index in range(30)]
    assert all(len(rows) == 1 and len(rows[0].ids) == 50 for rows in parts)
    assert len({tuple(rows[0].ids[5:8]) for rows in parts}) > 5
    value = made.encode(record(), None)
    assert all(len(row.ids) <= 50 for row in value.rows)
    labels, ids = iter(value.labels), []
    for row in value.rows:
        whole = list(row.ids)
        for place in row.places:
            whole[place] = next(labels)
        ids += whole[1:-1]
    assert ids == made.tokenizer.encode(TEXT) and next(labels, None) is None


def test_a_batch_has_the_labels_of_its_places():
    made = field()
    values = [made.encode(record(text, id=text), None) for text in ("a red circle", TEXT, "x")]
    rows = made.collate(values)
    assert rows.counts == [len(value.labels) for value in values] and len(rows.labels) == len(rows.places)
    seen = rows.tokens.flatten()[rows.places]
    assert (seen == made.tokenizer.mask_id).all() and rows.gaps == [value.gaps for value in values]
