"""Questions, conversations and stories about scenes, each answered anew from what the scene holds."""

import re
from collections import Counter, defaultdict

import pytest

from vlm.data.records import select_last_questions
from vlm.data.shapes.scene_questions import NUMBERS, SceneConversations, SceneDifferences, SceneQuestions
from vlm.data.shapes.scene_stories import SceneStories
from vlm.data.shapes.scenes import draw_scene, find_relations, margin, valid_captions

OPTIONS = {"seed": 3, "shapes": ["circle", "triangle", "cross"], "colors": ["red", "green", "blue", "yellow"]}
OPTIONS |= {"sizes": ["small", "large"]}


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
            if name != match[2] and match[1] in find_relations(one, objects[match[2]], scene.image_size)
        ]
        assert len(there) < 2
        return f"a {there[0]}" if there else "nothing"
    if match := re.fullmatch(r"is the (.*) (left of|right of|above|below) the (.*)\?", text):
        holds = match[2] in find_relations(objects[match[1]], objects[match[3]], scene.image_size)
        return "yes" if holds else "no"
    if match := re.fullmatch(r"where is the (.*) from the (.*)\?", text):
        return " and ".join(find_relations(objects[match[1]], objects[match[2]], scene.image_size)) + " it"
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
        assert {question.turns for question in later} <= {question.turns for question in select_last_questions(asked)}
        assert {question.before for question in later} <= {other.turns for other in asked}
        answers.update(question.answer for question in later)
    assert answers.most_common(1)[0][1] / answers.total() < 0.5


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
    source = SceneStories(**OPTIONS, **numbers)
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


@pytest.fixture(scope="module")
def differences():
    return SceneDifferences(**OPTIONS, train_scenes=200, val_scenes=20, test_scenes=40, questions_per_kind=2)


def kinds(stamp):
    """The looks of the objects of the first scene and of the second, by the records' own descriptions."""
    scenes = stamp.split("Scene(")[1:]
    found = [re.findall(r"Kind\(size='(\w+)', color='(\w+)', shape='(\w+)'\)", scene) for scene in scenes]
    return [[" ".join(kind) for kind in scene] for scene in found]


@pytest.mark.parametrize("name", ["train", "test"])
def test_what_differs_is_true_of_both_scenes(differences, name):
    places = []
    for record in differences.split(name).records():
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


def test_a_record_holds_both_images(differences):
    split = differences.split("val")
    first, second = split.record(3).images()
    assert first.size == second.size == (64, 64) and first.tobytes() != second.tobytes()
    assert first.tobytes() == draw_scene(differences.scene(split.keys(3))).tobytes()
