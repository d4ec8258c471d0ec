"""Pairs of scenes that differ in one thing, held against the scenes themselves."""

import re

import pytest

from vlm.data.shapes.scene_differences import SceneDifferences
from vlm.data.shapes.scenes import draw

LOOKS = {"shapes": ["circle", "triangle", "cross"], "colors": ["red", "green", "blue", "yellow"]}
OPTIONS = {"seed": 3, **LOOKS, "sizes": ["small", "large"]}


@pytest.fixture(scope="module")
def source():
    return SceneDifferences(**OPTIONS, train_scenes=200, val_scenes=20, test_scenes=40, questions_per_kind=2)


def kinds(stamp):
    """The looks of the objects of the first scene and of the second, by the records' own descriptions."""
    scenes = stamp.split("Scene(")[1:]
    found = [re.findall(r"Kind\(size='(\w+)', color='(\w+)', shape='(\w+)'\)", scene) for scene in scenes]
    return [[" ".join(kind) for kind in scene] for scene in found]


@pytest.mark.parametrize("name", ["train", "test"])
def test_the_answers_are_true_of_the_scenes(source, name):
    places = []
    for record in source.split(name).records():
        first, second = kinds(record.read_stamp())
        (at,) = [place for place, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]]
        changed = sum(a != b for a, b in zip(first[at].split(), second[at].split(), strict=True))
        assert changed == 1 and first[at].split()[0] == second[at].split()[0]  # sizes stay
        assert len(set(second)) == len(second)
        difference, *others = record["questions"]
        assert difference[:3] == ("what differs?", f"a {first[at]} became a {second[at]}", "difference")
        for text, answer, kind, *_ in others:
            look = re.fullmatch(r"which scene has a (.*)\?", text)[1]
            assert kind == "place" and answer == ("the first" if look in first else "the second")
            assert (look in first) != (look in second)
            places.append(answer)
    assert 0.3 < places.count("the first") / len(places) < 0.7


def test_a_record_holds_both_images(source):
    split = source.split("val")
    first, second = split.record(3).images()
    assert first.size == second.size == (64, 64) and first.tobytes() != second.tobytes()
    assert first.tobytes() == draw(source.scene(split.keys(3))).tobytes()
