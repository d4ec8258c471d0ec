"""Questions and conversations about scenes of coloured shapes."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Unpack

import numpy as np

from vlm.data.records import Question, Record
from vlm.data.shapes.scene_source import Keys, SceneOptions, SceneSource
from vlm.data.shapes.scenes import Kind, Scene, SceneObject, draw_scene, find_relations, valid_captions
from vlm.errors import Count
from vlm.randomness import numpy_rng

RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = ("none", "one", "two", "three")
Answer = tuple[str, Kind, str]  # a relation, the landmark that it is to, and the object in it


class SceneQuestions(SceneSource):
    """Scenes with one question of each kind.

        color       what color is the small cross?                        red
        count       how many circles are there?                           two
        position    what is left of the small red cross?                  a large blue circle
        yes_no      is the small red cross above the large blue circle?   no
        where       where is the red cross from the large blue circle?    left of and below it

    Splits share no combination of objects. Questions alone reveal little: what they ask for is equally often present
    and absent, and all colors are equally frequent.

    Args:
        questions_per_kind: Number of questions of each kind per training scene, duplicates removed; other splits have
            one.
        options: See SceneSource.
    """

    holds = ("image", "questions")
    name = "questions about shapes"

    def __init__(self, *, questions_per_kind: Count = 1, **options: Unpack[SceneOptions]) -> None:
        super().__init__(**options)
        self.questions_per_kind = questions_per_kind

    def sample(self, keys: Keys) -> Record:
        scene, rng = self.scene(keys), numpy_rng("scene questions", keys.seed, keys.id)
        candidates = [ask(scene, self, rng) for ask in KINDS.values() for _ in range(self.repeats(keys))]
        questions = list(dict.fromkeys(question for question in candidates if question is not None))
        return keys.record({"questions": questions}, scene)

    def repeats(self, keys: Keys) -> int:
        """Number of questions of each kind."""
        return self.questions_per_kind if keys.split == "train" else 1


def ask_color(scene: Scene, source: SceneQuestions, rng: np.random.Generator) -> Question | None:
    """The color of an object that is identified by its size and shape."""
    looks = [(kind.size, kind.shape) for kind, _, _ in scene.objects]
    unique = [kind for kind, _, _ in scene.objects if looks.count((kind.size, kind.shape)) == 1]
    if not unique:
        return None
    kind = unique[rng.integers(len(unique))]
    return Question(f"what color is the {kind.size} {kind.shape}?", kind.color, "color")


def ask_count(scene: Scene, source: SceneQuestions, rng: np.random.Generator) -> Question:
    """The number of objects of a shape or a color; present in two thirds of the questions."""
    shaped = rng.random() < 0.5
    looks = [kind.shape if shaped else kind.color for kind, _, _ in scene.objects]
    names = source.shapes if shaped else source.colors
    absent = sorted(set(names) - set(looks))
    candidates = looks if not absent or rng.random() < 2 / 3 else absent
    name = candidates[rng.integers(len(candidates))]
    noun = pluralize(name) if shaped else f"{name} objects"
    return Question(f"how many {noun} are there?", NUMBERS[looks.count(name)], "count")


def pluralize(shape: str) -> str:
    """The plural of the name of a shape."""
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


def ask_position(scene: Scene, source: SceneQuestions, rng: np.random.Generator) -> Question | None:
    """The only object in a relation to another; the answer is "nothing" in a quarter of the questions."""
    present, absent = find_answers(scene, scene.objects)
    if not present:
        return None
    candidates = present if rng.random() < 3 / 4 else absent
    relation, kind, answer = candidates[rng.integers(len(candidates))]
    return Question(f"what is {relation} the {kind}?", answer, "position")


def find_answers(scene: Scene, landmarks: Sequence[SceneObject]) -> tuple[list[Answer], list[Answer]]:
    """The relations to some objects that a single object is in, and those that none is in ("nothing")."""
    present: list[Answer] = []
    absent: list[Answer] = []
    for landmark, relation in product(landmarks, RELATIONS):
        matching = [placed for placed in scene.objects if relation in relations_to(placed, landmark, scene)]
        if len(matching) == 1:
            present.append((relation, landmark.kind, f"a {matching[0].kind}"))
        elif not matching:
            absent.append((relation, landmark.kind, "nothing"))
    return present, absent


def ask_yes_no(scene: Scene, source: SceneQuestions, rng: np.random.Generator) -> Question:
    """The presence of a color and shape, or a relation of two objects; true in half of the questions."""
    true = bool(rng.random() < 0.5)
    if len(scene.objects) > 1 and rng.random() < 0.5:
        subject, landmark = (scene.objects[at] for at in rng.permutation(len(scene.objects))[:2])
        holds = relations_to(subject, landmark, scene)
        fitting = [relation for relation in RELATIONS if (relation in holds) == true]
        text = f"is the {subject.kind} {fitting[rng.integers(len(fitting))]} the {landmark.kind}?"
    else:
        present = sorted({(kind.color, kind.shape) for kind, _, _ in scene.objects})
        pairs = [(color, shape) for color in source.colors for shape in source.shapes]
        absent = [pair for pair in pairs if pair not in present]
        true = true or not absent
        candidates = present if true else absent
        color, shape = candidates[rng.integers(len(candidates))]
        text = f"is there a {color} {shape}?"
    return Question(text, "yes" if true else "no", "yes_no")


def ask_where(scene: Scene, source: SceneQuestions, rng: np.random.Generator) -> Question | None:
    """The relations of one object to another, which answers to other kinds only imply."""
    if len(scene.objects) < 2:
        return None
    subject, landmark = (scene.objects[at] for at in rng.permutation(len(scene.objects))[:2])
    answer = " and ".join(relations_to(subject, landmark, scene))
    return Question(f"where is the {subject.kind} from the {landmark.kind}?", f"{answer} it", "where")


def relations_to(subject: SceneObject, landmark: SceneObject, scene: Scene) -> list[str]:
    """The relations of an object to another; none to itself."""
    return [] if subject is landmark else find_relations(subject, landmark, scene.image_size)


Ask = Callable[[Scene, SceneQuestions, np.random.Generator], Question | None]
KINDS: dict[str, Ask] = {
    "color": ask_color,
    "count": ask_count,
    "position": ask_position,
    "yes_no": ask_yes_no,
    "where": ask_where,
}


class SceneDifferences(SceneQuestions):
    """Two scenes per record: in the second, one object has another colour or shape.

        difference  what differs?                              a small red cross became a small blue cross
        place       which scene has a small blue cross?        the second

    The combination of objects in the first scene occurs in no other split.

    Args:
        questions_per_kind: Number of "place" questions per pair of training scenes; other splits have one.
        options: See SceneSource.
    """

    name = "differences of scenes"

    def sample(self, keys: Keys) -> Record:
        scene, rng = self.scene(keys), numpy_rng("differences of scenes", keys.seed, keys.id)
        at = int(rng.integers(len(scene.objects)))
        old = scene.objects[at].kind
        present = {kind for kind, _, _ in scene.objects}
        changed = [old._replace(color=color) for color in self.colors]
        changed += [old._replace(shape=shape) for shape in self.shapes]
        candidates = [kind for kind in changed if kind not in present]
        new = candidates[rng.integers(len(candidates))]
        second = scene._replace(
            objects=(*scene.objects[:at], scene.objects[at]._replace(kind=new), *scene.objects[at + 1 :])
        )
        questions = [Question("what differs?", f"a {old} became a {new}", "difference")]
        for number in range(self.repeats(keys)):
            later = (number + int(rng.integers(2))) % 2
            answer = ("the first", "the second")[later]
            questions.append(Question(f"which scene has a {(old, new)[later]}?", answer, "place"))
        record = keys.record({"questions": list(dict.fromkeys(questions))}, scene)
        record.open_more, record.read_stamp = [partial(draw_scene, second)], lambda: f"{scene} {second}"
        return record


DESCRIBE = "describe the image."


class SceneConversations(SceneQuestions):
    """Scenes with one conversation of each kind.

        caption      describe the image.                                a small red cross left of a large blue circle
        color, count, position, yes_no, where                           as in SceneQuestions
        second_turn  what color is the small cross?   red    what is left of it?    nothing

    Args:
        questions_per_kind: Number of conversations of each kind per training scene, duplicates removed; other splits
            have one.
        options: See SceneSource.
    """

    has_turns = True
    name = "conversations about shapes"

    def sample(self, keys: Keys) -> Record:
        scene, rng, times = self.scene(keys), numpy_rng("scene conversations", keys.seed, keys.id), self.repeats(keys)
        candidates = [ask(scene, self, rng) for ask in KINDS.values() for _ in range(times)]
        candidates += [describe(scene, rng) for _ in range(times)]
        for first in [candidates[at] for at in range(times)]:  # the color questions, which name one object each
            candidates.append(None if first is None else second_question(first, scene, rng))
        questions = [*dict.fromkeys(question for question in candidates if question is not None)]
        return keys.record({"questions": questions}, scene)


def describe(scene: Scene, rng: np.random.Generator) -> Question:
    """A question whose answer is one of the valid captions, drawn at random."""
    captions = valid_captions(scene)
    return Question(DESCRIBE, captions[rng.integers(len(captions))], "caption", tuple(captions))


def second_question(first: Question, scene: Scene, rng: np.random.Generator) -> Question | None:
    """A second turn about the object of a color question; a quarter of the answers are "nothing", where possible."""
    (subject,) = [
        placed for placed in scene.objects if first.text == f"what color is the {placed.kind.size} {placed.kind.shape}?"
    ]
    present, absent = find_answers(scene, [subject])
    if not present:
        return None
    candidates = present if not absent or rng.random() < 3 / 4 else absent
    relation, _, answer = candidates[rng.integers(len(candidates))]
    return Question(f"what is {relation} it?", answer, "second_turn", before=first.turns)
