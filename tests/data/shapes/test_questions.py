"""Questions and conversations about scenes, each answered anew from what the scene holds."""

import re
from collections import Counter, defaultdict

import pytest

from vlm.data.records import conversations
from vlm.data.shapes.scene_conversations import SceneConversations
from vlm.data.shapes.scene_questions import NUMBERS, SceneQuestions
from vlm.data.shapes.scenes import relations, valid_captions

LOOKS = {"shapes": ["circle", "triangle", "cross"], "colors": ["red", "green", "blue", "yellow"]}
OPTIONS = {"seed": 3, **LOOKS, "sizes": ["small", "large"]}


@pytest.fixture(scope="module")
def source():
    return SceneQuestions(**OPTIONS, train_scenes=400, val_scenes=50, test_scenes=200)


def answer(text, scene):
    """The answer to a question, by its words and the places of the scene's objects."""
    objects = {str(one.kind): one for one in scene.objects}
    if match := re.fullmatch(r"what color is the (small|large) (\w+)\?", text):
        (kind,) = [one.kind for one in scene.objects if (one.kind.size, one.kind.shape) == match.groups()]
        return kind.color
    if match := re.fullmatch(r"how many (\w+) objects are there\?", text):
        return NUMBERS[sum(one.kind.color == match[1] for one in scene.objects)]
    if match := re.fullmatch(r"how many (\w+?)(?:es|s) are there\?", text):
        name = {"circl": "circle", "triangl": "triangle"}.get(match[1], match[1])
        return NUMBERS[sum(one.kind.shape == name for one in scene.objects)]
    if match := re.fullmatch(r"what is (left of|right of|above|below) the (.*)\?", text):
        there = [
            name
            for name, one in objects.items()
            if name != match[2] and match[1] in relations(one, objects[match[2]], scene.image_size)
        ]
        assert len(there) < 2
        return f"a {there[0]}" if there else "nothing"
    if match := re.fullmatch(r"is the (.*) (left of|right of|above|below) the (.*)\?", text):
        holds = match[2] in relations(objects[match[1]], objects[match[3]], scene.image_size)
        return "yes" if holds else "no"
    if match := re.fullmatch(r"where is the (.*) from the (.*)\?", text):
        return " and ".join(relations(objects[match[1]], objects[match[2]], scene.image_size)) + " it"
    match = re.fullmatch(r"is there a (\w+) (\w+)\?", text)
    return "yes" if any((one.kind.color, one.kind.shape) == match.groups() for one in scene.objects) else "no"


def test_every_answer_is_true_of_its_scene(source):
    for name in ("train", "test"):
        split = source.split(name)
        for index in range(len(split)):
            record, scene = split.record(index), split.source.scene(split.keys(index))
            kinds = [question.kind for question in record["questions"]]
            assert len(set(kinds)) == len(kinds) >= 2
            for question in record["questions"]:
                assert question.answer == answer(question.text, scene), (question, scene)


def test_a_question_alone_tells_little(source):
    """The most frequent answer of each kind, which is all that is known without the image."""
    answers = defaultdict(Counter)
    for record in source.split("train").records():
        for question in record["questions"]:
            answers[question.kind][question.answer] += 1
    shares = {kind: counts.most_common(1)[0][1] / counts.total() for kind, counts in answers.items()}
    assert shares.keys() == {"color", "count", "position", "yes_no", "where"}
    assert all(share < 0.65 for share in shares.values()) and sum(shares.values()) / 5 < 0.5


def test_training_scenes_may_have_several_questions_of_a_kind():
    source = SceneQuestions(**OPTIONS, train_scenes=50, val_scenes=1, test_scenes=50, questions_per_kind=2)
    train, test = ([record["questions"] for record in source.split(name).records()] for name in ("train", "test"))
    assert all(len(set(questions)) == len(questions) for questions in train)
    assert any(len(questions) == 10 for questions in train) and max(map(len, test)) == 5


@pytest.fixture(scope="module")
def chats():
    return SceneConversations(**OPTIONS, train_scenes=300, val_scenes=20, test_scenes=150)


def test_every_turn_is_true_of_its_scene(chats):
    kinds = Counter()
    for name in ("train", "test"):
        split = chats.split(name)
        for index in range(len(split)):
            record, scene = split.record(index), split.source.scene(split.keys(index))
            for question in record["questions"]:
                kinds[question.kind] += 1
                if question.kind == "caption":
                    assert set(question.answers) == set(valid_captions(scene)) and question.answer in question.answers
                    continue
                text = question.text
                if question.before:  # "it" is what the first turn asked about
                    (_, first), (_, color) = question.before
                    size, shape = first.removeprefix("what color is the ").removesuffix("?").split()
                    text = text.replace("it?", f"the {size} {color} {shape}?")
                assert question.answer == answer(text, scene), (question, scene)
    assert kinds.keys() == {"caption", "color", "count", "position", "yes_no", "where", "second_turn"}
    assert min(kinds.values()) > 100


def test_a_second_turn_goes_on_with_the_first_and_tells_little_alone(chats):
    answers = Counter()
    for record in chats.split("train").records():
        asked = record["questions"]
        later = [question for question in asked if question.before]
        assert {question.turns for question in later} <= {question.turns for question in conversations(asked)}
        assert {question.before for question in later} <= {other.turns for other in asked}
        answers.update(question.answer for question in later)
    assert answers.most_common(1)[0][1] / answers.total() < 0.5
