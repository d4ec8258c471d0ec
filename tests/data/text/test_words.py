"""The rule by which raw text is split into words, on sentences split by hand."""

import pytest

from vlm.data.text.words import split_words

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
    "": "",
}


@pytest.mark.parametrize("text", SENTENCES)
def test_words_of_raw_text(text):
    assert split_words(text) == SENTENCES[text].split()


def test_nothing_but_space_is_lost():
    text = "It's 5 o'clock: e-mail x_y, don't!\n\tvis-à-vis 3/4 #1 @a.b"
    assert "".join(split_words(text)) == "".join(text.split())
