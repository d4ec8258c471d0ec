"""Questions about scenes of coloured shapes, with one answer each."""

from collections.abc import Callable
from typing import Unpack

import numpy as np

from vlm.data.records import Question, Record
from vlm.data.shapes.drawn import Keys
from vlm.data.shapes.scene_source import SceneOptions, SceneSource
from vlm.data.shapes.scenes import Placed, Scene, relations
from vlm.errors import Count
from vlm.randomness import numpy_rng

RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = ("none", "one", "two", "three")


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
        times = self.questions_per_kind if keys.split == "train" else 1
        asked = [ask(scene, self, rng) for ask in KINDS.values() for _ in range(times)]
        questions = list(dict.fromkeys(question for question in asked if question is not None))
        return keys.record({"questions": questions}, scene)


def ask_color(scene: Scene, source: SceneQuestions, rng: np.random.Generator) -> Question | None:
    """The color of an object that is identified by its size and shape."""
    looks = [(kind.size, kind.shape) for kind, _, _ in scene.objects]
    alone = [kind for kind, _, _ in scene.objects if looks.count((kind.size, kind.shape)) == 1]
    if not alone:
        return None
    kind = alone[rng.integers(len(alone))]
    return Question(f"what color is the {kind.size} {kind.shape}?", kind.color, "color")


def ask_count(scene: Scene, source: SceneQuestions, rng: np.random.Generator) -> Question:
    """The number of objects of a shape or a color; present in two thirds of the questions."""
    shaped = rng.random() < 0.5
    looks = [kind.shape if shaped else kind.color for kind, _, _ in scene.objects]
    names = source.shapes if shaped else source.colors
    absent = sorted(set(names) - set(looks))
    among = looks if not absent or rng.random() < 2 / 3 else absent
    name = among[rng.integers(len(among))]
    noun = plural(name) if shaped else f"{name} objects"
    return Question(f"how many {noun} are there?", NUMBERS[looks.count(name)], "count")


def plural(shape: str) -> str:
    """The plural of the name of a shape."""
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


def ask_position(scene: Scene, source: SceneQuestions, rng: np.random.Generator) -> Question | None:
    """The only object in a relation to another; the answer is "nothing" in a quarter of the questions."""
    places: dict[int, list[tuple[str, str, str]]] = {0: [], 1: []}
    for other in scene.objects:
        for relation in RELATIONS:
            there = [one for one in scene.objects if relation in relations_of(one, other, scene)]
            if len(there) < 2:
                answer = f"a {there[0].kind}" if there else "nothing"
                places[len(there)].append((relation, str(other.kind), answer))
    if not places[1]:
        return None
    among = places[1] if rng.random() < 3 / 4 else places[0]
    relation, kind, answer = among[rng.integers(len(among))]
    return Question(f"what is {relation} the {kind}?", answer, "position")


def ask_yes_no(scene: Scene, source: SceneQuestions, rng: np.random.Generator) -> Question:
    """The presence of a color and shape, or a relation of two objects; true in half of the questions."""
    true = bool(rng.random() < 0.5)
    if len(scene.objects) > 1 and rng.random() < 0.5:
        one, other = (scene.objects[at] for at in rng.permutation(len(scene.objects))[:2])
        holds = relations_of(one, other, scene)
        fitting = [relation for relation in RELATIONS if (relation in holds) == true]
        text = f"is the {one.kind} {fitting[rng.integers(len(fitting))]} the {other.kind}?"
    else:
        present = sorted({(kind.color, kind.shape) for kind, _, _ in scene.objects})
        every = [(color, shape) for color in source.colors for shape in source.shapes]
        absent = [pair for pair in every if pair not in present]
        true = true or not absent
        among = present if true else absent
        color, shape = among[rng.integers(len(among))]
        text = f"is there a {color} {shape}?"
    return Question(text, "yes" if true else "no", "yes_no")


def ask_where(scene: Scene, source: SceneQuestions, rng: np.random.Generator) -> Question | None:
    """The relations of one object to another, which answers to other kinds only imply."""
    if len(scene.objects) < 2:
        return None
    one, other = (scene.objects[at] for at in rng.permutation(len(scene.objects))[:2])
    answer = " and ".join(relations_of(one, other, scene))
    return Question(f"where is the {one.kind} from the {other.kind}?", f"{answer} it", "where")


def relations_of(one: Placed, other: Placed, scene: Scene) -> list[str]:
    """The relations of an object to another; none to itself."""
    return [] if one is other else relations(one, other, scene.image_size)


Ask = Callable[[Scene, SceneQuestions, np.random.Generator], Question | None]
KINDS: dict[str, Ask] = {
    "color": ask_color,
    "count": ask_count,
    "position": ask_position,
    "yes_no": ask_yes_no,
    "where": ask_where,
}
