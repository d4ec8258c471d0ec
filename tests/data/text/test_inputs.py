"""Texts as rows of ids for an encoder, counted by hand."""

from collections import Counter

import pytest
import torch
from rows import RowSource, open_fields

from vlm.data.batch import IGNORE
from vlm.data.fields import CaptionField
from vlm.data.records import Record
from vlm.data.text.inputs import (
    EncodedSample,
    Input,
    InputField,
    MaskedField,
    TagField,
    WordsField,
    encode_text,
    encode_words,
    input_rows,
)
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer
from vlm.errors import UserError
from vlm.randomness import numpy_rng

BYTES = ByteTokenizer()
B, E = BYTES.bos_id, BYTES.eos_id
ids = BYTES.encode


def test_a_text_stands_between_begin_and_end_and_the_second_of_a_pair_is_of_type_1_with_its_end():
    assert encode_text(BYTES, 10, "red") == Input([B, *ids("red"), E], [0] * 5)
    assert encode_text(BYTES, 4, "red").ids == [B, *ids("re"), E]
    assert encode_text(BYTES, 20, "red", "blue") == Input([B, *ids("red"), E, *ids("blue"), E], [0] * 5 + [1] * 5)


@pytest.mark.parametrize(
    ("text", "pair", "kept"),
    [
        ("abcdef", "uvwxyz", ("abcd", "uvw")),
        ("abcdef", "u", ("abcdef", "u")),
        ("abcdefgh", "uv", ("abcde", "uv")),
        ("", "uvwxyz12345", ("", "uvwxyz1")),
    ],
)
def test_of_a_pair_that_is_too_long_the_longer_text_is_cut(text, pair, kept):
    row = encode_text(BYTES, 10, text, pair)
    assert row.ids == [B, *ids(kept[0]), E, *ids(kept[1]), E] and len(row.ids) == len(row.types) <= 10


def test_of_each_word_the_first_piece_has_a_place():
    (row,) = encode_words(BYTES, 20, ["a", "red", "dot"])
    assert row.ids == [B, *ids(" a red dot"), E]
    assert row.places == [1, 3, 7] and [row.ids[place] for place in row.places] == ids(" ") * 3


def test_a_word_with_spaces_inside_begins_once_with_a_space():
    (row,) = encode_words(BYTES, 40, ["Việt Nam", "to"])
    assert row.ids == [B, *ids(" Việt\u00a0Nam to"), E]
    assert [at for at, id in enumerate(row.ids) if id in ids(" ")] == row.places


def test_too_many_words_take_several_rows_and_none_is_lost():
    rows = encode_words(BYTES, 8, ["ab", "cd", "e", "fghijklmnop", "q"])
    assert [row.ids for row in rows] == [
        [B, *ids(" ab cd"), E],
        [B, *ids(" e"), E],
        [B, *ids(" fghij"), E],  # a word longer than a row is cut
        [B, *ids(" q"), E],
    ]
    assert [row.places for row in rows] == [[1, 4], [1], [1], [1]]


def test_rows_are_padded_and_their_places_counted_through():
    samples = [
        EncodedSample(encode_words(BYTES, 8, ["ab", "cd", "e"])),
        EncodedSample(encode_words(BYTES, 8, ["x"]), ["x"]),
    ]
    rows = input_rows(samples, BYTES.pad_id)
    assert rows.tokens.shape == (2, 8) and rows.types is None
    assert rows.segments.tolist() == [[1] * 8, [1] * 4 + [2] * 4]
    assert rows.layout.tolist() == [[*range(8)], [8, 9, 10, 11, *[-1] * 4], [12, 13, 14, 15, *[-1] * 4]]
    assert rows.places.tolist() == [1, 4, 9, 13] and rows.counts == [3, 1] and rows.texts == [(), ["x"]]
    assert torch.equal(rows.tokens.flatten()[rows.places], torch.tensor(ids(" ") * 4))


def test_types_stand_where_a_row_is_a_pair():
    rows = input_rows([EncodedSample([encode_text(BYTES, 9, *texts)]) for texts in (["a"], ["a", "bc"])], BYTES.pad_id)
    assert rows.types.tolist() == [[0] * 8, [0, 0, 0, 1, 1, 1, 0, 0]]
    assert rows.places is None and input_rows([EncodedSample([encode_text(BYTES, 9, "a")])], 0).types is None
    assert input_rows([], BYTES.pad_id).tokens.shape == (0, 0)


def test_texts_share_rows_in_order_and_lie_there_whole():
    rng = numpy_rng("rows")
    texts = [Input([int(id) for id in rng.integers(1, 99, length)], [0] * length) for length in rng.integers(3, 31, 40)]
    rows = input_rows([EncodedSample([text]) for text in texts], pad_id=0)
    assert rows.ids() == [text.ids for text in texts]
    positions, used = rows.tokens.numel(), sum(len(text.ids) for text in texts)
    assert used <= positions < 1.2 * used < 40 * max(len(text.ids) for text in texts)
    owners = torch.zeros(positions, dtype=torch.long)
    for number, at in enumerate(rows.layout, start=1):
        at = at[at >= 0]
        assert (at.diff() == 1).all() and len({place // rows.tokens.shape[1] for place in at.tolist()}) == 1
        owners[at] = number  # of a row, its texts count on
    firsts = owners.view_as(rows.tokens)[:, 0]
    assert firsts[0] == 1 and (firsts[firsts > 0].diff() > 0).all()
    assert torch.equal(owners > 0, rows.segments.flatten() > 0)


def test_rows_of_their_own_stay_where_sharing_makes_none_fewer():
    rows = input_rows([EncodedSample([Input([7] * 70, [0] * 70)])] * 8, pad_id=0)
    assert rows.tokens.shape == (8, 72) and rows.layout is None and rows.ids() == [[7] * 70] * 8


TRAIN = [
    {"text": "a red dot", "captions": ["ein roter Punkt"], "words": ["a", "dot"], "tags": ["O", "B"]},
    {"text": "rot", "captions": ["öde"], "words": ["red"], "tags": ["I"]},
]
VAL = [{"text": "xyz", "captions": [], "words": ["dot", "dot"], "tags": ["B", "Z"]}]


SOURCE = RowSource({"train": TRAIN, "val": VAL})


def test_a_shared_tokenizer_is_learned_from_the_texts_of_all_its_fields():
    shared, own = CharTokenizer(), CharTokenizer()
    source, target = InputField(tokenizer=shared, max_len=9), CaptionField(tokenizer=shared, max_len=9)
    words = WordsField(tokenizer=own, max_len=9)
    open_fields(SOURCE, source, target, words)
    texts = ["a red dot", "rot", "ein roter Punkt", "öde"]
    assert shared.fingerprint == CharTokenizer().fit(texts).fingerprint
    assert own.fingerprint == CharTokenizer().fit([" a dot", " red"]).fingerprint
    assert source.sizes == target.sizes == {"vocab_size": shared.vocab_size}


def test_a_text_is_read_and_counted():
    field = InputField(tokenizer=CharTokenizer(), max_len=8)
    open_fields(SOURCE, field)
    record = SOURCE.split("train").record(0)
    rows = field.collate([field.encode(record, None)])
    tokenizer = field.tokenizer
    assert rows.tokens.tolist() == [[tokenizer.bos_id, *tokenizer.encode("a red "), tokenizer.eos_id]]
    assert field.length(record) == 8 and field.identity(record) == ["a red dot"] and not field.pairs
    pair = Record("", {"text": "a", "pair": "dot"})
    assert field.collate([field.encode(pair, None)]).types.tolist() == [[0] * 3 + [1] * 4 + [0]]


def test_words_and_tags_are_as_many():
    tokenizer = CharTokenizer()
    words, tags = WordsField(tokenizer=tokenizer, max_len=5), TagField()
    open_fields(SOURCE, words, tags)
    records = [record for name in SOURCE.splits for record in SOURCE.split(name).records()]
    rows = words.collate([words.encode(record, None) for record in records])
    found = tags.collate([tags.encode(record, None) for record in records])
    assert tags.classes == ["B", "I", "O"] and tags.sizes == {"num_classes": 3}
    assert found.labels.tolist() == [2, 0, 1, 0, IGNORE]  # of the last tag training knows nothing
    assert found.count == 4 and found.tags == [["O", "B"], ["I"], ["B", "Z"]]
    assert rows.counts == [2, 1, 2] and len(rows.places) == 5 and rows.texts == [r["words"] for r in (*TRAIN, *VAL)]
    assert words.length(records[0]) == 4 + 5  # begin, space, a, end; then begin, space, d, o, end


def test_what_a_checkpoint_holds_is_taken_again():
    field, tags, fresh = InputField(tokenizer=CharTokenizer(), max_len=8), TagField(), TagField()
    open_fields(SOURCE, field, tags)
    again = InputField(tokenizer=CharTokenizer(), max_len=8)
    again.restore(field.state())
    assert again.tokenizer.fingerprint == field.tokenizer.fingerprint and field.state()["max_len"] == 8
    open_fields(SOURCE, fresh)
    fresh.restore({"classes": ["I", "B"]})
    assert fresh.collate([["B", "O"]]).labels.tolist() == [1, IGNORE]


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
