"""Passages in windows: every word once or more with its own pieces, the answer's ends where its words are."""

import random

import pytest
import torch

from vlm.data.records import Record
from vlm.data.text.passages import PassageField, encode_passage, find_covering_words, find_words
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer

TEXT = "The Wi-Fi cost $5.20 (in 1999) – naïve, 東京タワー and d'accord."


def test_words_are_all_signs_but_white_space():
    words = [TEXT[start:stop] for start, stop in find_words(TEXT)]
    assert "".join(words) == "".join(TEXT.split())
    assert words[:7] == ["The", "Wi", "-", "Fi", "cost", "$", "5"] and "naïve" in words and "東" in words


def test_the_words_that_cover_a_part_of_the_text():
    words = find_words(TEXT)
    for start in range(len(TEXT)):
        for stop in range(start + 1, len(TEXT) + 1):
            inside = [n for n, (a, b) in enumerate(words) if set(range(a, b)) & set(range(start, stop))]
            assert find_covering_words(words, start, stop) == ((inside[0], inside[-1]) if inside else None)


@pytest.mark.parametrize("stride", [1, 5, 1000])
def test_windows_hold_every_word_and_fit(stride):
    rng, tokenizer = random.Random(stride), ByteTokenizer()
    for _ in range(200):
        passage = " ".join("abcdefghij"[: rng.randint(1, 10)] for _ in range(rng.randint(0, 20)))
        words, max_len = find_words(passage), rng.randint(9, 40)
        windows = encode_passage(tokenizer, max_len, stride, "why?", passage)
        seen = []
        for row, first in windows:
            assert len(row.ids) == len(row.types) <= max_len
            inner = row.types.index(1)
            assert tokenizer.decode(row.ids[:inner]) == "why?"[: max_len // 2]
            assert row.places[0] == 0 and row.ids[0] == tokenizer.bos_id and row.ids[-1] == tokenizer.eos_id
            numbers = range(first, first + len(row.places) - 1)
            seen += numbers
            for number, start, stop in zip(numbers, row.places[1:], [*row.places, len(row.ids) - 1][2:], strict=True):
                read = tokenizer.decode(row.ids[start:stop])
                assert f" {passage[slice(*words[number])]}".startswith(read) and read.strip()
        assert sorted(set(seen)) == list(range(len(words)))
        firsts = [first for _, first in windows]
        assert firsts == sorted(set(firsts))


def test_windows_move_on_by_the_stride():
    passage = " ".join("abc" for _ in range(20))  # words of four bytes
    firsts = [first for _, first in encode_passage(ByteTokenizer(), 30, 12, "", passage)]
    assert firsts == [0, 3, 6, 9, 12, 15] and len(encode_passage(ByteTokenizer(), 83, 12, "", passage)) == 1


def record(answers, question="who?"):
    return Record("r", {"question": question, "context": "red green blue", "answers": answers})


def test_the_ends_of_an_answer_in_each_window():
    field = PassageField(tokenizer=ByteTokenizer(), max_len=18, stride=5)  # room for 11 bytes of passage
    spans = field.encode(record([("green", 4), ("red", 0)]), None)
    assert [window.first for window in spans.windows] == [0, 1]
    # " red green" lies in one window, " green" and " blue" in the next.
    assert spans.ends == [(10, 10), (6, 6)] and spans.texts == ("who?", "red green blue", "green", "red")
    across = field.encode(record([("red green blue", 0)]), None)
    assert across.ends == [(0, 0), (0, 0)]  # no window holds it whole
    assert field.encode(record([]), None).ends == [(0, 0), (0, 0)]
    rows = field.collate([spans, field.encode(record([("bl", 10)]), ())])
    assert rows.tokens.shape[0] == 2 and rows.firsts == [[0, 1], [0, 1]] and rows.counts == [5 + 1, 5 + 1]
    assert torch.equal(rows.ends, torch.tensor([[10, 10], [6, 6], [0, 0], [12, 12]]))
    assert rows.layout is not None and len(rows.layout) == 4  # two windows share a row
    assert set(rows.layout.gather(1, rows.ends).flatten().tolist()) <= set(rows.places.tolist())


def test_lower_casing_that_changes_a_texts_length_moves_no_word():
    context = "İİİ stands before Ankara"  # each of the first letters has two code points in lower case
    field = PassageField(tokenizer=CharTokenizer(lowercase=True).fit([context]), max_len=64, stride=8)
    spans = field.encode(Record("r", {"question": "", "context": context, "answers": [("Ankara", 18)]}), None)
    window = spans.windows[0].row
    assert field.tokenizer.decode(window.ids[spans.ends[0][0] :]) == " ankara"


def test_words_that_the_question_has_too_are_of_a_type_of_their_own():
    context = "The red fox met a red-nosed İ, the fox?"
    shared = Record("r", {"question": "Where is THE fox, red?", "context": context, "answers": []})
    options = {"tokenizer": ByteTokenizer(), "max_len": 128, "stride": 64}
    plain, marked = PassageField(**options), PassageField(**options, marks_shared=True)
    (before,), (window,) = (field.encode(shared, None).windows for field in (plain, marked))
    row = window.row
    assert row.ids == before.row.ids and row.places == before.row.places
    assert [min(type, 1) for type in row.types] == before.row.types
    words = [context[slice(*word)] for word in find_words(context)]
    types = [row.types[start] for start in row.places[1:]]
    assert {word for word, type in zip(words, types, strict=True) if type == 2} == {"The", "red", "fox", "the"}
    assert all(type == 1 for word, type in zip(words, types, strict=True) if word in ("-", ",", "İ", "?"))
    assert marked.sizes["token_types"] == 3 and "token_types" not in plain.sizes
    assert marked.collate([marked.encode(shared, None)]).types.unique().tolist() == [0, 1, 2]
