"""Pairs of captions against their meaning: two say the same if they are true of the same placements."""

from collections import Counter, defaultdict
from itertools import product

from vlm.data.shapes.scene_pairs import ScenePairs
from vlm.data.shapes.scene_words import SceneWords

LOOKS = {"shapes": ["circle", "triangle", "cross"], "colors": ["red", "green", "blue"], "sizes": ["small", "large"]}
TRUTH = {
    "left of": lambda a, b: a[0] < b[0],
    "right of": lambda a, b: a[0] > b[0],
    "above": lambda a, b: a[1] < b[1],
    "below": lambda a, b: a[1] > b[1],
}


def source(**options):
    return ScenePairs(seed=0, **LOOKS, **{"train_pairs": 400, "val_pairs": 100, "test_pairs": 200} | options)


def parse(caption):
    """The two objects of a caption and its relation."""
    relation = next(name for name in TRUTH if f" {name} " in caption)
    return *caption.split(f" {relation} "), relation


def meaning(caption, things):
    """The placements of these things on a grid of two by two of which a caption is true."""
    one, other, relation = parse(caption)
    cells = list(product(range(2), repeat=2))
    places = [dict(zip(things, at, strict=True)) for at in product(cells, repeat=len(things))]
    return {n for n, at in enumerate(places) if TRUTH[relation](at[one], at[other])}


def test_a_label_says_whether_both_mean_the_same_and_both_are_as_frequent():
    for split in ("train", "val", "test"):
        records = list(source().split(split).records(100))
        for record in records:
            things = sorted({thing for text in (record["text"], record["pair"]) for thing in parse(text)[:2]})
            same = meaning(record["text"], things) == meaning(record["pair"], things)
            assert record["class"] == ("same" if same else "different"), dict(record.known)
        assert Counter(record["label"] for record in records) == {0: 50, 1: 50}


def test_words_alone_tell_little():
    """The best that can be said of the words of both captions, with no order, is right of little more than a half."""
    found = defaultdict(Counter)
    for record in source(train_pairs=20_000).split("train").records():
        relations = tuple(parse(record[name])[2] for name in ("text", "pair"))
        one, other = (Counter(record[name].split()) for name in ("text", "pair"))
        for relation, words in zip(relations, (one, other), strict=True):
            words.subtract(relation.split())
        assert one == other  # the kinds' words are the same in both classes
        found[relations][record["class"]] += 1
    best = sum(max(counts.values()) for counts in found.values()) / 20_000
    assert 0.5 < best < 0.59


def test_each_word_of_a_caption_has_its_kind():
    lengths = {f"{split}_captions": 60 for split in ("train", "val", "test")}
    words = SceneWords(seed=0, max_objects=3, **LOOKS, **lengths)
    grammar = {"size": LOOKS["sizes"], "colour": LOOKS["colors"], "shape": LOOKS["shapes"], "other": ["a", "and"]}
    grammar["relation"] = ["left", "right", "of", "above", "below"]
    records = [record for split in words.splits for record in words.split(split).records()]
    found = {pair for record in records for pair in zip(record["words"], record["tags"], strict=True)}
    assert found == {(word, tag) for tag, known in grammar.items() for word in known}
