"""Conversations with boxes: the location tokens are the edges of the objects that a text names."""

import re

import pytest

from vlm.data.shapes.scene_grounding import GroundedConversations
from vlm.data.shapes.scene_questions import SceneConversations
from vlm.data.shapes.scenes import find_box, valid_captions

OPTIONS = {"seed": 3, "image_size": 64, "shapes": ["circle", "triangle", "cross"], "sizes": ["small", "large"]}
OPTIONS |= {"colors": ["red", "green", "blue", "yellow"], "train_scenes": 60, "val_scenes": 30, "test_scenes": 30}
OBJECT = re.compile(r"((?:small|large) \w+ \w+) ((?:<loc\d{4}>){4})")


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"<loc(\d{4})>", text)]


def test_boxes_in_texts_are_those_of_the_objects() -> None:
    source, absent, found = GroundedConversations(**OPTIONS, max_objects=3, bins=65), 0, 0
    split = source.open("train")
    for index in range(60):
        scene, record = source.scene(split.keys(index)), split.record(index)
        edges = {str(placed.kind): find_box(placed, 64) for placed in scene.objects}
        boxes = {kind: [top, left, bottom, right] for kind, (left, top, right, bottom) in edges.items()}
        (ask,) = (question for question in record["questions"] if question.kind == "detect")
        kind = ask.text.removeprefix("detect ")
        if kind in boxes:
            found += 1
            assert numbers(ask.answer) == boxes[kind] and ask.answer.endswith(f"> {kind}")
        else:
            absent += 1
            assert ask.answer == "nothing"
        (grounded,) = (question for question in record["questions"] if question.kind == "grounded")
        assert grounded.answer in grounded.answers and len(grounded.answers) == len(valid_captions(scene))
        for caption in grounded.answers:
            named = OBJECT.findall(caption)
            assert {kind: numbers(text) for kind, text in named} == boxes
        without = sorted(re.sub(r" (<loc\d{4}>)+", "", caption) for caption in grounded.answers)
        assert without == valid_captions(scene)
    assert absent > 8 and found > 25


def test_the_other_conversations_are_those_of_scenes_without_boxes() -> None:
    grounded, plain = GroundedConversations(**OPTIONS, bins=11), SceneConversations(**OPTIONS)
    for name in ("train", "test"):
        for index in range(20):
            first, second = grounded.split(name).record(index, 1), plain.split(name).record(index, 1)
            count = len(second["questions"])
            assert first["questions"][:count] == second["questions"] and len(first["questions"]) == count + 2
            assert max(numbers(" ".join(map(str, first["questions"]))), default=0) < 11
            assert first.image().tobytes() == second.image().tobytes()


@pytest.mark.parametrize("most", [2, 3])
def test_a_split_is_the_same_again(most: int) -> None:
    first, second = (GroundedConversations(**OPTIONS, max_objects=most, bins=65).split("val") for _ in range(2))
    assert [first.record(n)["questions"] for n in range(9)] == [second.record(n)["questions"] for n in range(9)]
