"""Stories of scenes against the scenes: every sentence is true, and an answer is the one object that fits."""

import re

from vlm.data.shapes.scene_stories import SceneStories
from vlm.data.shapes.scenes import margin

LOOKS = {"shapes": ["circle", "triangle", "cross"], "colors": ["red", "green", "blue"], "sizes": ["small", "large"]}
SENTENCE = re.compile(r"the (\w+ \w+ \w+) is (left of|right of|above|below) the (\w+ \w+ \w+)\.")
QUESTION = re.compile(r"what is (left of|right of|above|below) the (\w+ \w+ \w+)\?")


def holds(one, relation, other):
    """The relation by the pixels of the centres, y pointing down."""
    across, down = other.x - one.x, other.y - one.y
    far = {"left of": across, "right of": -across, "above": down, "below": -down}[relation]
    return far >= margin(64)


def stories():
    """Each record with the objects of its scene by their names."""
    numbers = {"train_stories": 300, "val_stories": 60, "test_stories": 100}
    source = SceneStories(seed=0, max_objects=3, **LOOKS, **numbers)
    for name in source.splits:
        split = source.split(name)
        for index, record in enumerate(split.records()):
            yield record, {str(placed.kind): placed for placed in source.scene(split.keys(index)).objects}


def test_every_sentence_is_true_and_each_pair_is_told_once():
    for record, objects in stories():
        facts = SENTENCE.findall(record["context"])
        assert " ".join(f"the {a} is {relation} the {b}." for a, relation, b in facts) == record["context"]
        assert all(holds(objects[a], relation, objects[b]) for a, relation, b in facts)
        assert len({frozenset((a, b)) for a, _, b in facts}) == len(facts) == len(objects) * (len(objects) - 1) // 2


def test_an_answer_is_the_only_object_that_fits_and_without_one_there_is_none():
    kinds = set()
    for record, objects in stories():
        ((relation, name),) = QUESTION.findall(record["question"])
        true = [other for other, placed in objects.items() if holds(placed, relation, objects[name])]
        assert [text for text, _ in record["answers"]] == true
        kinds.add(len(true))
        for text, start in record["answers"]:
            assert record["context"][start : start + len(text)] == text
            before, after = record["context"][:start].rpartition(".")[2], record["context"][start:].partition(".")[0]
            assert name in before + after  # in the sentence that says so
    assert kinds == {0, 1}
