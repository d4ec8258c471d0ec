"""Scenes described in sentences, with questions about positions: a generated reading-comprehension task."""

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple, Unpack

import numpy as np

from vlm.data.records import Record
from vlm.data.shapes.drawn import Keys
from vlm.data.shapes.scene_pairs import INVERSE
from vlm.data.shapes.scene_source import KindOptions, SceneSource
from vlm.data.shapes.scenes import Kind, Placed, Scene, relations
from vlm.errors import Count
from vlm.randomness import numpy_rng

UNANSWERABLE = 1 / 3  # share of questions without an answer


class Fact(NamedTuple):
    """A sentence of a story: the position of its subject relative to another object."""

    subject: Kind
    relation: str
    other: Kind

    def __str__(self) -> str:
        return f"the {self.subject} is {self.relation} the {self.other}."


class Asked(NamedTuple):
    """A question, which object is in a relation to another, with its answer and the answer's offset in the story."""

    relation: str
    other: Kind
    answer: str = ""
    start: int = 0

    def __str__(self) -> str:
        return f"what is {self.relation} the {self.other}?"


def tell(scene: Scene, rng: np.random.Generator) -> list[Fact]:
    """One sentence per pair of objects, in random order and direction, with one of the true relations."""
    pairs = list(combinations(scene.objects, 2))
    facts = []
    for at in rng.permutation(len(pairs)):
        one, other = (pairs[at][n] for n in rng.permutation(2))
        true = relations(one, other, scene.image_size)
        facts.append(Fact(one.kind, true[rng.integers(len(true))], other.kind))
    return facts


def answerable(scene: Scene, facts: list[Fact]) -> Iterator[Asked]:
    """The questions that a sentence of the story answers and that have no other answer in the scene."""
    start = 0
    for fact in facts:
        subject, relation, other = fact
        other_start = start + len(str(fact)) - len(f"{other}.")
        if len(_standing(scene, relation, other)) == 1:
            yield Asked(relation, other, str(subject), start + len("the "))
        if len(_standing(scene, INVERSE[relation], subject)) == 1:
            yield Asked(INVERSE[relation], subject, str(other), other_start)
        start += len(f"{fact} ")


def unanswerable(scene: Scene) -> list[Asked]:
    """The questions about the scene's objects that have no answer."""
    kinds = [placed.kind for placed in scene.objects]
    return [Asked(relation, kind) for relation in INVERSE for kind in kinds if not _standing(scene, relation, kind)]


def _standing(scene: Scene, relation: str, kind: Kind) -> list[Placed]:
    """The objects in this relation to the one of this kind."""
    (other,) = (placed for placed in scene.objects if placed.kind == kind)
    others = (placed for placed in scene.objects if placed.kind != kind)
    return [placed for placed in others if relation in relations(placed, other, scene.image_size)]


class SceneStories(SceneSource):
    """A story and a question per scene.

    Args:
        train_stories, val_stories, test_stories: Number of stories per split (and epoch).
        options: See SceneSource.
    """

    holds = ("question", "context", "answers")
    name = "stories of scenes"

    def __init__(
        self, *, train_stories: Count, val_stories: Count, test_stories: Count, **options: Unpack[KindOptions]
    ) -> None:
        super().__init__(
            train_scenes=train_stories,
            val_scenes=val_stories,
            test_scenes=test_stories,
            object_weights=(0, 1, 3),  # a single object has no relations
            **options,
        )

    def sample(self, keys: Keys) -> Record:
        scene, rng = self.scene(keys), numpy_rng("story of a scene", *keys)
        facts = tell(scene, rng)
        questions = [] if rng.random() < UNANSWERABLE else list(answerable(scene, facts))
        questions = questions or unanswerable(scene)
        asked = questions[rng.integers(len(questions))]
        answers = [(asked.answer, asked.start)] if asked.answer else []
        return keys.record({"question": str(asked), "context": " ".join(map(str, facts)), "answers": answers})
