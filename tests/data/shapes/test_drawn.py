"""What holds of every drawn source: its keys alone decide a sample, and its splits share nothing."""

import re

import pytest

from vlm.data.shapes.lines import DrawnLines
from vlm.data.shapes.scene_captions import DistinctShapes, Shapes
from vlm.data.shapes.scene_labels import ScenePairs, SceneRoles, SceneWords, ShapeClasses
from vlm.data.shapes.scene_questions import SceneConversations, SceneDifferences, SceneQuestions
from vlm.data.shapes.scene_stories import SceneStories, SceneSummaries
from vlm.data.shapes.scene_translations import SceneSpelling, SceneTranslations

LOOKS = {"shapes": ["circle", "triangle", "cross"], "colors": ["red", "green", "blue"], "sizes": ["small", "large"]}
COUNTS = {"train": 80, "val": 30, "test": 40}


def drawn_kinds(record):
    """The kinds of objects in the first image."""
    scene = record.read_stamp().split("Scene(")[1]
    return frozenset(re.findall(r"Kind\(size='(\w+)', color='(\w+)', shape='(\w+)'\)", scene))


def named_kinds(name):
    """The kinds of objects that a text names."""
    return lambda record: frozenset(re.findall(r"(?:small|large) \w+ \w+", record[name]))


# Each source: the word for its samples, its options, and what of a record is in one split alone.
MADE = {
    Shapes: ("scenes", LOOKS | {"captions_per_image": 2}, drawn_kinds),
    DistinctShapes: ("scenes", LOOKS | {"captions_per_image": None}, drawn_kinds),
    ShapeClasses: ("scenes", LOOKS, None),
    SceneQuestions: ("scenes", LOOKS, drawn_kinds),
    SceneConversations: ("scenes", LOOKS, drawn_kinds),
    SceneDifferences: ("scenes", LOOKS, drawn_kinds),
    SceneTranslations: ("scenes", LOOKS, drawn_kinds),
    ScenePairs: ("pairs", LOOKS, named_kinds("text")),
    SceneRoles: ("captions", LOOKS, named_kinds("text")),
    SceneWords: ("captions", LOOKS, named_kinds("text")),
    SceneSpelling: ("scenes", LOOKS, named_kinds("translation")),
    SceneSummaries: ("scenes", LOOKS, named_kinds("text")),
    SceneStories: ("stories", LOOKS, named_kinds("context")),
    DrawnLines: ("lines", {}, lambda record: record["captions"][0].lower()),
}


def make_source(kind, seed=0):
    word, options, _ = MADE[kind]
    return kind(seed=seed, **options, **{f"{name}_{word}": count for name, count in COUNTS.items()})


def content(record):
    return dict(record.values), record.read_stamp() if "image" in record else None


def rows(split, epoch):
    """What the records hold, read backwards."""
    return [content(split.record(index, epoch)) for index in reversed(range(len(split)))][::-1]


@pytest.mark.sample(plain=4, slow=10)
@pytest.mark.parametrize("kind", MADE)
def test_a_sample_is_a_function_of_its_keys_and_training_has_fresh_ones(kind):
    one, two, other = make_source(kind), make_source(kind), make_source(kind, seed=1)
    assert one.name and {name: len(one.split(name)) for name in one.splits} == COUNTS
    for name in one.splits:
        split, again = one.split(name), two.split(name)
        assert split.fresh == (name == "train")
        found = [content(record) for record in split.records()]
        assert found == rows(again, 0) != rows(other.split(name), 0)
        assert (rows(split, 2) == found) == (rows(split, 3) == rows(split, 2)) == (not split.fresh)
        ids = {split.record(index, epoch).id for index in range(9) for epoch in (0, 2)}
        assert len(ids) == (18 if split.fresh else 9) and len({record.id for record in split.records()}) == len(split)
        if "image" in kind.holds:
            assert [i.tobytes() for i in split.record(4, 2).images()] == [
                i.tobytes() for i in again.record(4, 2).images()
            ]
    assert one.split("train").record(17, 3).id == "train-3-000017"


@pytest.mark.parametrize("kind", [kind for kind, (*_, own) in MADE.items() if own])
def test_no_two_splits_share_a_combination(kind):
    source, own = make_source(kind), MADE[kind][-1]
    seen = {name: {own(record) for record in source.split(name).records()} for name in source.splits}
    assert min(map(len, seen.values())) > 3
    assert not seen["train"] & seen["val"] and not seen["train"] & seen["test"] and not seen["val"] & seen["test"]
