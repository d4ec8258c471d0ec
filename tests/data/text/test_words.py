"""The rule by which raw text is split into words, on sentences split by hand, and texts of one line."""

import pytest

from vlm.data.text.passages import find_words
from vlm.data.text.words import split_words, to_single_line

SENTENCES = {
    "I don't know.": "I do n't know .",
    "She's sure they'll come; we've seen it.": "She 's sure they 'll come ; we 've seen it .",
    "He can't and WON'T (really)!": "He ca n't and WO N'T ( really ) !",
    "The U.S. paid $3.50 for 1,000 'items'.": "The U.S. paid $ 3.50 for 1,000 ' items ' .",
    "Mail a.b@c.org or see http://x.org/y?z=1 today...": "Mail a.b@c.org or see http://x.org/y?z=1 today ...",
    "see (http://x.org), www.y.org. or mail me@x.org.": "see ( http://x.org ) , www.y.org . or mail me@x.org .",
    "@paul likes #photos -- a lot": "@paul likes #photos -- a lot",
    "l’été, c’est 10 h": "l ’ été , c ’ est 10 h",
    "a small red circle left of a large blue cross": "a small red circle left of a large blue cross",
    "हिन्दी भाषा, cafe\u0301s ½l x³!": "हिन्दी भाषा , cafe\u0301s ½l x³ !",  # marks part no word
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7": "\U0001f1e9\U0001f1ea \U0001f1eb\U0001f1f7",  # flags side by side
    "": "",
}


@pytest.mark.parametrize("text", SENTENCES)
def test_words_of_raw_text(text):
    assert split_words(text) == SENTENCES[text].split()


def test_nothing_but_space_is_lost():
    text = "It's 5 o'clock: e-mail x_y, don't!\n\tvis-à-vis 3/4 #1 @a.b"
    assert "".join(split_words(text)) == "".join(text.split())


# A family of joiners, a heart with a variation selector, a flag, a skin tone, a keycap, a flag of tags, letters with
# marks that have no code point of their own, syllables of Hindi, Thai and jamo.
SEEN_AS_ONE = ["\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u2764\ufe0f", "\U0001f1e9\U0001f1ea"]
SEEN_AS_ONE += ["\U0001f44d\U0001f3fd", "1\ufe0f\u20e3", "q\u0303\u0323", "\u0928\u094d\u0926\u0940", "\u0e01\u0e33"]
SEEN_AS_ONE += ["\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "\u1112\u1161\u11ab"]


@pytest.mark.parametrize("character", SEEN_AS_ONE, ids=ascii)
def test_what_a_person_sees_as_one_character_is_not_cut(character):
    text, words = f"so {character}, {character}!", ["so", character, ",", character, "!"]
    assert split_words(text) == [text[slice(*place)] for place in find_words(text)] == words


def test_any_white_space_but_plain_spaces_becomes_one_space():
    assert to_single_line("a  b") == "a  b"
    for space in (chr(code) for code in range(0x3001) if chr(code).isspace() and chr(code) != " "):
        assert to_single_line(f"{space} a {space}\n{space} b{space}") == "a b"


def test_a_translation_keeps_its_no_break_spaces():
    assert (
        to_single_line("\t « Oui\u00a0! »\r\n—\u202fNon\u00a0\n", keep_no_break=True)
        == "« Oui\u00a0! » —\u202fNon\u00a0"
    )
