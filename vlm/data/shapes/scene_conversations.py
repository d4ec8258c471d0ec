"""Conversations about scenes of coloured shapes: captions, counts, questions, and second turns."""

import numpy as np

from vlm.data.records import Question, Record
from vlm.data.shapes.drawn import Keys
from vlm.data.shapes.scene_questions import KINDS, RELATIONS, SceneQuestions, relations_of
from vlm.data.shapes.scenes import Scene, valid_captions
from vlm.randomness import numpy_rng

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

    turns = True
    name = "conversations about shapes"

    def sample(self, keys: Keys) -> Record:
        scene, rng = self.scene(keys), numpy_rng("scene conversations", keys.seed, keys.id)
        times = self.questions_per_kind if keys.split == "train" else 1
        asked = [ask(scene, self, rng) for ask in KINDS.values() for _ in range(times)]
        asked += [describe(scene, rng) for _ in range(times)]
        for first in [asked[at] for at in range(times)]:  # the color questions, which name one object each
            asked.append(None if first is None else second_question(first, scene, rng))
        questions = [*dict.fromkeys(question for question in asked if question is not None)]
        return keys.record({"questions": questions}, scene)


def describe(scene: Scene, rng: np.random.Generator) -> Question:
    """A question whose answer is one of the valid captions, drawn at random."""
    captions = valid_captions(scene)
    return Question(DESCRIBE, captions[rng.integers(len(captions))], "caption", tuple(captions))


def second_question(first: Question, scene: Scene, rng: np.random.Generator) -> Question | None:
    """A second turn about the object of a color question; a quarter of the answers are "nothing", where possible."""
    (it,) = [one for one in scene.objects if first.text == f"what color is the {one.kind.size} {one.kind.shape}?"]
    places: dict[int, list[tuple[str, str]]] = {0: [], 1: []}
    for relation in RELATIONS:
        there = [one for one in scene.objects if relation in relations_of(one, it, scene)]
        if len(there) < 2:
            places[len(there)].append((relation, f"a {there[0].kind}" if there else "nothing"))
    if not places[1]:
        return None
    among = places[1] if not places[0] or rng.random() < 3 / 4 else places[0]
    relation, answer = among[rng.integers(len(among))]
    return Question(f"what is {relation} it?", answer, "second_turn", before=first.turns)
