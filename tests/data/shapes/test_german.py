"""German of scenes, held against sentences that are written out here."""

import re
from itertools import product

import pytest

from vlm.data.shapes import german
from vlm.data.shapes.scene_translations import SceneTranslations
from vlm.data.shapes.scenes import COLORS, RADII, SHAPES, Kind, Statement

CIRCLE, CROSS, DIAMOND = (
    Kind("small", "red", "circle"),
    Kind("large", "blue", "cross"),
    Kind("small", "green", "diamond"),
)
PHRASES = {
    ("nominative", "a"): ["ein kleiner roter Kreis", "eine kleine grüne Raute", "ein großes blaues Kreuz"],
    ("accusative", "a"): ["einen kleinen roten Kreis", "eine kleine grüne Raute", "ein großes blaues Kreuz"],
    ("dative", "a"): ["einem kleinen roten Kreis", "einer kleinen grünen Raute", "einem großen blauen Kreuz"],
    ("nominative", "the"): ["der kleine rote Kreis", "die kleine grüne Raute", "das große blaue Kreuz"],
    ("accusative", "the"): ["den kleinen roten Kreis", "die kleine grüne Raute", "das große blaue Kreuz"],
    ("dative", "the"): ["dem kleinen roten Kreis", "der kleinen grünen Raute", "dem großen blauen Kreuz"],
}
ALONE, BESIDE = Statement(DIAMOND, ()), Statement(CIRCLE, (("left of", CROSS),))
AMONG = Statement(CROSS, (("above", DIAMOND), ("right of", CIRCLE)))
SENTENCES = [
    (german.caption, ALONE, "a small green diamond", "eine kleine grüne Raute"),
    (
        german.caption,
        AMONG,
        "a large blue cross above a small green diamond and right of a small red circle",
        "ein großes blaues Kreuz über einer kleinen grünen Raute und rechts von einem kleinen roten Kreis",
    ),
    (
        german.there_is,
        BESIDE,
        "there is a small red circle left of a large blue cross",
        "es gibt einen kleinen roten Kreis links von einem großen blauen Kreuz",
    ),
    (
        german.you_can_see,
        BESIDE,
        "you can see a small red circle left of a large blue cross",
        "man kann einen kleinen roten Kreis links von einem großen blauen Kreuz sehen",
    ),
    (
        german.now_drawn,
        ALONE,
        "now I have drawn a small green diamond",
        "jetzt habe ich eine kleine grüne Raute gezeichnet",
    ),
    (
        german.the_one_is,
        BESIDE,
        "the small red circle is left of the large blue cross",
        "der kleine rote Kreis ist links vom großen blauen Kreuz",
    ),
    (
        german.the_one_is,
        AMONG,
        "the large blue cross is above the small green diamond and right of the small red circle",
        "das große blaue Kreuz ist über der kleinen grünen Raute und rechts vom kleinen roten Kreis",
    ),
    (german.the_one_is, ALONE, "the small green diamond is in the picture", "die kleine grüne Raute ist im Bild"),
    (
        german.one_that_is,
        AMONG,
        "a large blue cross that is above a small green diamond and right of a small red circle",
        "ein großes blaues Kreuz, das über einer kleinen grünen Raute und rechts von einem kleinen roten Kreis ist",
    ),
    (
        german.one_that_is,
        ALONE,
        "a small green diamond that is in the picture",
        "eine kleine grüne Raute, die im Bild ist",
    ),
    (
        german.one_that_is,
        Statement(CIRCLE, (("left of", DIAMOND),)),
        "a small red circle that is left of a small green diamond",
        "ein kleiner roter Kreis, der links von einer kleinen grünen Raute ist",
    ),
]
OPTIONS = {"seed": 0, "shapes": ["circle", "cross", "diamond"], "colors": ["red", "green"], "sizes": ["small", "large"]}
OPTIONS |= {"max_objects": 2, "train_scenes": 200, "val_scenes": 60, "test_scenes": 60}


@pytest.mark.parametrize("case, article", PHRASES)
def test_phrases_agree_in_gender_and_case(case, article):
    assert [german.phrase(kind, case, article) for kind in (CIRCLE, DIAMOND, CROSS)] == PHRASES[case, article]


@pytest.mark.parametrize("form, statement, english, translation", SENTENCES)
def test_sentences(form, statement, english, translation):
    assert form(statement) == (english, translation)


def test_every_form_is_written_out_and_every_word_is_known():
    assert {form for form, *_ in SENTENCES} == set(german.FORMS)
    for size, color, shape in product(RADII, COLORS, SHAPES):
        assert len(german.phrase(Kind(size, color, shape), "dative").split()) == 4
    assert german.phrase(Kind("large", "white", "star"), "accusative") == "einen großen weißen Stern"


def test_a_caption_is_the_scenes_own():
    assert german.caption(AMONG).english == str(AMONG)


def nouns(text):
    """The kinds of objects that an English sentence names."""
    return frozenset(re.findall(r"(?:small|large) \w+ \w+", text))


def test_samples_are_a_function_of_their_keys_and_combinations_are_held_out():
    one, two = SceneTranslations(**OPTIONS), SceneTranslations(**OPTIONS)
    found = {name: [record.known for record in one.split(name).records()] for name in one.splits}
    assert found == {name: [record.known for record in two.split(name).records()] for name in two.splits}
    train = one.split("train")
    assert train.record(3, 1).known != train.record(3, 0).known
    assert one.split("val").record(3, 1).known == one.split("val").record(3, 0).known
    named = {name: {nouns(known["text"]) for known in rows} for name, rows in found.items()}
    assert not named["test"] & (named["train"] | named["val"]) and len(named["test"]) > 5
    first = [known["text"].split()[0] for known in found["train"]]
    assert {word: first.count(word) > 10 for word in set(first)} == dict.fromkeys(
        ("a", "there", "you", "now", "the"), True
    )


def test_a_record_shows_its_scene():
    image = SceneTranslations(**OPTIONS).split("test").record(0).image()
    assert image.size == (64, 64)


def test_colours_that_only_the_image_shows():
    told, hidden = (SceneTranslations(**OPTIONS, hide_colors=flag).split("test") for flag in (False, True))
    for one, other in zip(told.records(), hidden.records(), strict=True):
        assert other["translation"] == one["translation"]
        words = zip(one["text"].split(), other["text"].split(), strict=True)
        assert all(b == ("colored" if a in COLORS else a) for a, b in words)
    assert not any(color in record["text"].split() for record in hidden.records() for color in COLORS)
