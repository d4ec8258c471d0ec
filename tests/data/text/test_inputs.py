"""Texts as rows of ids for an encoder, counted by hand."""

import pytest
import torch

from vlm.data.text.inputs import EncodedSample, Input, encode_text, encode_words, input_rows
from vlm.data.text.tokenizer import ByteTokenizer
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
