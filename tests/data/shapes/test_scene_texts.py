"""Texts of scenes by their meaning: pairs of captions, tagged words, summaries, mistakes."""

import re
from collections import Counter, defaultdict
from itertools import product

import pytest

from vlm.data.shapes.scene_labels import FORMS, ScenePairs, SceneRoles, SceneWords, tag_phrases
from vlm.data.shapes.scene_stories import SceneSummaries
from vlm.data.shapes.scene_translations import LETTERS, SceneSpelling, misspell
from vlm.data.shapes.scenes import SHAPES, Kind, Statement
from vlm.randomness import numpy_rng

LOOKS = {"shapes": ["circle", "triangle", "cross"], "colors": ["red", "green", "blue"], "sizes": ["small", "large"]}
TRUTH = {
    "left of": lambda a, b: a[0] < b[0],
    "right of": lambda a, b: a[0] > b[0],
    "above": lambda a, b: a[1] < b[1],
    "below": lambda a, b: a[1] > b[1],
}


def pairs_of(split, count=200, **options):
    numbers = {"train_pairs": 400, "val_pairs": 100, "test_pairs": 200} | options
    return list(ScenePairs(seed=0, **LOOKS, **numbers).split(split).records(count))


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


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_label_says_whether_both_mean_the_same_and_both_are_as_frequent(split):
    records = pairs_of(split, 100)
    for record in records:
        things = sorted({thing for text in (record["text"], record["pair"]) for thing in parse(text)[:2]})
        same = meaning(record["text"], things) == meaning(record["pair"], things)
        assert record["class"] == ("same" if same else "different"), dict(record.values)
    assert Counter(record["label"] for record in records) == {0: 50, 1: 50}


@pytest.mark.slow
def test_words_alone_tell_little():
    """The best that can be said of the words of both captions, with no order, is right of little more than a half."""
    found = defaultdict(Counter)
    for record in pairs_of("train", 20_000, train_pairs=20_000):
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


def roles_of(sentence):
    """Words of a sentence on one relation with their roles, read by what stands around them."""
    relation = re.search(r"(left of|right of|above|below)", sentence)
    if relation is None:
        return {"subject": sentence.removeprefix("there is ")}
    before, after = sentence[: relation.start()].strip(), sentence[relation.end() :].strip()
    if after == "it":  # a blue cross with a red circle left of it
        landmark, subject = before.split(" with ")
    elif not before:  # left of a blue cross is a red circle
        landmark, subject = after.split(" is ")
    else:
        subject, landmark = before.removeprefix("there is ").removesuffix(" is"), after
    return {"subject": subject, "relation": relation[0], "landmark": landmark}


def test_tags_are_the_roles_of_a_sentence_and_its_words_alone_do_not_tell_them():
    lengths = {f"{split}_captions": 400 for split in ("train", "val", "test")}
    source = SceneRoles(seed=0, max_objects=2, omit_adjectives=0.25, **LOOKS, **lengths)
    counts, forms = defaultdict(Counter), Counter()
    for record in (record for split in source.splits for record in source.split(split).records()):
        found, role = defaultdict(list), None
        for word, tag in zip(record["words"], record["tags"], strict=True):
            begin, _, name = tag.partition("-")
            assert begin == "O" or begin == ("I" if name == role else "B")
            role = name
            found[name].append(word)
            counts[word][name] += 1
        bare = {name: re.sub("^(the|an?) ", "", text) for name, text in roles_of(record["text"]).items()}
        assert {name: " ".join(words) for name, words in found.items() if name} == bare, record["text"]
        forms[" ".join(tag for tag in dict.fromkeys(record["tags"]) if tag.startswith("B"))] += 1
    assert len(forms) == 4 and min(forms.values()) > 50  # the subject alone; before, between and after
    for word in (*LOOKS["sizes"], *LOOKS["colors"], *LOOKS["shapes"]):
        assert min(counts[word].values()) > 0.25 * counts[word].total() and len(counts[word]) == 2


def test_roles_of_two_landmarks():
    red, blue = Kind("", "red", "circle"), Kind("small", "blue", "cross")
    statement = Statement(red, (("left of", blue), ("above", Kind("", "", "triangle"))))
    tagged = [" ".join(map("/".join, zip(*tag_phrases(form(statement)), strict=True))) for form in FORMS[2]]
    places = (
        "left/B-relation of/I-relation a/O small/B-landmark blue/I-landmark cross/I-landmark and/O above/B-relation"
    )
    assert tagged[0] == f"a/O red/B-subject circle/I-subject {places} a/O triangle/B-landmark"
    assert tagged[-1] == f"{places} a/O triangle/B-landmark is/O a/O red/B-subject circle/I-subject"


SCENES = {"train_scenes": 300, "val_scenes": 50, "test_scenes": 50, "seed": 0}
NUMBERS = {"a": 1, "two": 2, "three": 3}


def test_a_summary_counts_the_objects_of_its_story():
    source = SceneSummaries(**LOOKS | {"shapes": list(SHAPES)[:5]}, **SCENES)
    for record in [record for split in source.splits for record in source.split(split).records()]:
        shapes = Counter(name.split()[-1] for name in set(re.findall(r"the (\w+ \w+ \w+)", record["text"])))
        parts = [part.split() for part in re.split(", | and ", record["translation"])]
        said = {re.sub("(?<=s)es$|(?<=[^s])s$", "", noun): NUMBERS[number] for number, noun in parts}
        assert said == shapes and 2 <= shapes.total() <= 3
        assert len(record["translation"]) < len(record["text"])


def edits(word):
    """All words that one mistake makes of a word."""
    for at in range(len(word)):
        yield word[:at] + word[at + 1 :]
        yield word[:at] + word[at] + word[at:]
        yield from (word[:at] + letter + word[at + 1 :] for letter in LETTERS)
        if at + 1 < len(word):
            yield word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def test_a_mistake_is_one_edit():
    for seed in range(300):
        for word in ("red", "yellow", "cross", "diamond"):
            wrong = misspell(word, numpy_rng("test", seed))
            assert wrong != word and wrong in set(edits(word))


def test_words_are_misspelled_as_often_as_asked_and_the_target_is_right():
    wrong, right = (SceneSpelling(mistakes=share, **LOOKS, **SCENES).split("train") for share in (0.3, 0.0))
    records = list(wrong.records())
    words = [pair for one in records for pair in zip(one["text"].split(), one["translation"].split(), strict=True)]
    assert [record["translation"] for record in records] == [record["text"] for record in right.records()]
    long = [(wrong, right) for wrong, right in words if len(right) >= 3]
    assert abs(sum(wrong != right for wrong, right in long) / len(long) - 0.3) < 0.03
    assert all(wrong == right for wrong, right in words if len(right) < 3)
    assert all(wrong == right or wrong in set(edits(right)) for wrong, right in words)
