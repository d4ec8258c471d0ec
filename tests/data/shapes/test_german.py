"""German of scenes, held against sentences that are written out here."""

from collections import Counter
from itertools import product

import pytest

from vlm.data.shapes import scene_translations as german
from vlm.data.shapes.scene_translations import SceneTranslations
from vlm.data.shapes.scenes import COLORS, RADII, SHAPES, Kind, Statement

CIRCLE, CROSS = Kind("small", "red", "circle"), Kind("large", "blue", "cross")
DIAMOND = Kind("small", "green", "diamond")
PHRASES = {
    ("nominative", "a"): ["ein kleiner roter Kreis", "eine kleine grüne Raute", "ein großes blaues Kreuz"],
    ("accusative", "a"): ["einen kleinen roten Kreis", "eine kleine grüne Raute", "ein großes blaues Kreuz"],
    ("dative", "a"): ["einem kleinen roten Kreis", "einer kleinen grünen Raute", "einem großen blauen Kreuz"],
    ("nominative", "the"): ["der kleine rote Kreis", "die kleine grüne Raute", "das große blaue Kreuz"],
    ("accusative", "the"): ["den kleinen roten Kreis", "die kleine grüne Raute", "das große blaue Kreuz"],
    ("dative", "the"): ["dem kleinen roten Kreis", "der kleinen grünen Raute", "dem großen blauen Kreuz"],
}
STATEMENTS = {
    "alone": Statement(DIAMOND, ()),
    "beside": Statement(CIRCLE, (("left of", CROSS),)),
    "left": Statement(CIRCLE, (("left of", DIAMOND),)),
    "among": Statement(CROSS, (("above", DIAMOND), ("right of", CIRCLE))),
    "unsized": Statement(Kind("", "red", "circle"), (("left of", Kind("", "blue", "cross")),)),
    "bare": Statement(
        Kind("", "orange", "diamond"), (("below", Kind("small", "", "circle")), ("above", Kind("", "", "cross")))
    ),
}
# The form and the statement, the English sentence, the German one.
SENTENCES = """
caption alone: a small green diamond
eine kleine grüne Raute
caption among: a large blue cross above a small green diamond and right of a small red circle
ein großes blaues Kreuz über einer kleinen grünen Raute und rechts von einem kleinen roten Kreis
there_is beside: there is a small red circle left of a large blue cross
es gibt einen kleinen roten Kreis links von einem großen blauen Kreuz
infinitive beside: you can see a small red circle left of a large blue cross
man kann einen kleinen roten Kreis links von einem großen blauen Kreuz sehen
participle alone: now I have drawn a small green diamond
jetzt habe ich eine kleine grüne Raute gezeichnet
definite beside: the small red circle is left of the large blue cross
der kleine rote Kreis ist links vom großen blauen Kreuz
definite among: the large blue cross is above the small green diamond and right of the small red circle
das große blaue Kreuz ist über der kleinen grünen Raute und rechts vom kleinen roten Kreis
definite alone: the small green diamond is in the picture
die kleine grüne Raute ist im Bild
relative among: a large blue cross that is above a small green diamond and right of a small red circle
ein großes blaues Kreuz, das über einer kleinen grünen Raute und rechts von einem kleinen roten Kreis ist
relative alone: a small green diamond that is in the picture
eine kleine grüne Raute, die im Bild ist
relative left: a small red circle that is left of a small green diamond
ein kleiner roter Kreis, der links von einer kleinen grünen Raute ist
caption unsized: a red circle left of a blue cross
ein roter Kreis links von einem blauen Kreuz
definite unsized: the red circle is left of the blue cross
der rote Kreis ist links vom blauen Kreuz
there_is bare: there is an orange diamond below a small circle and above a cross
es gibt eine orangefarbene Raute unter einem kleinen Kreis und über einem Kreuz
""".strip().splitlines()
OPTIONS = {"seed": 0, "shapes": ["circle", "cross", "diamond"], "colors": ["red", "green"], "sizes": ["small", "large"]}
OPTIONS |= {"max_objects": 2, "train_scenes": 200, "val_scenes": 60, "test_scenes": 60}


@pytest.mark.parametrize("case, article", PHRASES)
def test_phrases_agree_in_gender_and_case(case, article):
    assert [german.noun_phrase(kind, case, article) for kind in (CIRCLE, DIAMOND, CROSS)] == PHRASES[case, article]


@pytest.mark.parametrize("line, translation", zip(SENTENCES[::2], SENTENCES[1::2], strict=True))
def test_sentences(line, translation):
    given, english = line.split(": ")
    form, statement = given.split()
    assert german.FORMS[form](STATEMENTS[statement]) == (english, translation)


def test_every_form_is_written_out_and_every_word_is_known():
    assert {line.split()[0] for line in SENTENCES[::2]} == {*german.FORMS}
    for size, color, shape in product(RADII, COLORS, SHAPES):
        assert len(german.noun_phrase(Kind(size, color, shape), "dative").split()) == 4
    assert german.noun_phrase(Kind("large", "white", "star"), "accusative") == "einen großen weißen Stern"


def test_training_has_all_forms():
    first = Counter(record["text"].split()[0] for record in SceneTranslations(**OPTIONS).split("train").records())
    assert first.keys() == {"a", "there", "you", "now", "the"} and min(first.values()) > 10


def test_sizes_and_colours_are_left_out_of_both_sentences_alike():
    """Each as often as the share says; the default leaves out none, so that runs of older configs keep their data."""
    (full, short, bare) = (SceneTranslations(**OPTIONS, omit_adjectives=share) for share in (0.0, 0.25, 1.0))
    older = SceneTranslations(**OPTIONS).split("train")
    assert older.record(1, 1)["text"] == "a large red diamond"
    assert older.record(3, 1)["text"] == "you can see a large red circle above a small green diamond"
    assert [dict(record.values) for record in older.records()] == [
        dict(r.values) for r in full.split("train").records()
    ]
    words = {word: german.ADJECTIVES[word] for word in (*OPTIONS["sizes"], *OPTIONS["colors"])}
    kept, all_words = 0, 0
    for one, other, none in zip(*(source.split("train").records() for source in (full, short, bare)), strict=True):
        named = [word for word in other["text"].split() if word in words]
        written = [word for word in other["translation"].split() if word.startswith(tuple(words.values()))]
        assert Counter(named) == Counter(next(w for w, g in words.items() if word.startswith(g)) for word in written)
        kept, all_words = kept + len(named), all_words + sum(word in words for word in one["text"].split())
        assert not set(none["text"].split()) & set(words)
    assert 0.7 < kept / all_words < 0.8


def test_colours_that_only_the_image_shows():
    told, hidden = (SceneTranslations(**OPTIONS, hide_colors=flag).split("test") for flag in (False, True))
    for one, other in zip(told.records(), hidden.records(), strict=True):
        assert other["translation"] == one["translation"]
        words = zip(one["text"].split(), other["text"].split(), strict=True)
        assert all(b == ("colored" if a in COLORS else a) for a, b in words)
