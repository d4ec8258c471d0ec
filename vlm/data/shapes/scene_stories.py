"""Stories about scenes, with questions about positions or with summaries."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple, Unpack

import numpy as np

from vlm.data.records import Record
from vlm.data.shapes.scene_labels import INVERSE
from vlm.data.shapes.scene_questions import NUMBERS, pluralize
from vlm.data.shapes.scene_source import Keys, KindOptions, SceneSource
from vlm.data.shapes.scenes import Kind, Scene, SceneObject, find_relations
from vlm.errors import Count
from vlm.randomness import numpy_rng

UNANSWERABLE = 1 / 3  # share of questions without an answer


class Fact(NamedTuple):
    """A sentence of a story: the position of its subject relative to another object."""

    subject: Kind
    relation: str
    landmark: Kind

    def __str__(self) -> str:
        return f"the {self.subject} is {self.relation} the {self.landmark}."


class RelationQuestion(NamedTuple):
    """A question, which object is in a relation to another, with its answer and the answer's offset in the story."""

    relation: str
    landmark: Kind
    answer: str = ""
    start: int = 0

    def __str__(self) -> str:
        return f"what is {self.relation} the {self.landmark}?"


def tell_story(scene: Scene, rng: np.random.Generator) -> list[Fact]:
    """One sentence per pair of objects, in random order and direction, with one of the true relations."""
    pairs = list(combinations(scene.objects, 2))
    facts = []
    for at in rng.permutation(len(pairs)):
        subject, landmark = (pairs[at][n] for n in rng.permutation(2))
        true = find_relations(subject, landmark, scene.image_size)
        facts.append(Fact(subject.kind, true[rng.integers(len(true))], landmark.kind))
    return facts


def answerable_questions(scene: Scene, facts: list[Fact]) -> Iterator[RelationQuestion]:
    """The questions that a sentence of the story answers and that have no other answer in the scene."""
    start = 0
    for fact in facts:
        subject, relation, landmark = fact
        landmark_start = start + len(str(fact)) - len(f"{landmark}.")
        if len(_objects_in_relation(scene, relation, landmark)) == 1:
            yield RelationQuestion(relation, landmark, str(subject), start + len("the "))
        if len(_objects_in_relation(scene, INVERSE[relation], subject)) == 1:
            yield RelationQuestion(INVERSE[relation], subject, str(landmark), landmark_start)
        start += len(f"{fact} ")


def unanswerable_questions(scene: Scene) -> list[RelationQuestion]:
    """The questions about the scene's objects that have no answer."""
    kinds = [placed.kind for placed in scene.objects]
    return [
        RelationQuestion(relation, kind)
        for relation in INVERSE
        for kind in kinds
        if not _objects_in_relation(scene, relation, kind)
    ]


def _objects_in_relation(scene: Scene, relation: str, kind: Kind) -> list[SceneObject]:
    """The objects in this relation to the one of this kind."""
    (landmark,) = (placed for placed in scene.objects if placed.kind == kind)
    candidates = (placed for placed in scene.objects if placed.kind != kind)
    return [placed for placed in candidates if relation in find_relations(placed, landmark, scene.image_size)]


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
        facts = tell_story(scene, rng)
        questions = [] if rng.random() < UNANSWERABLE else list(answerable_questions(scene, facts))
        questions = questions or unanswerable_questions(scene)
        question = questions[rng.integers(len(questions))]
        answers = [(question.answer, question.start)] if question.answer else []
        return keys.record({"question": str(question), "context": " ".join(map(str, facts)), "answers": answers})


class SceneSummaries(SceneSource):
    """One story per scene ("text") and its summary ("translation").

        the small red circle is above the large blue cross. the large red circle is left of the small red circle.
        two circles and a cross

    A story names an object once per relation, so a summary needs to recognise objects that were named before.

    Args:
        train_scenes, val_scenes, test_scenes: Number of stories per split (and epoch).
        options: See SceneSource.
    """

    holds = ("text", "translation")
    name = "summaries of scenes"

    def __init__(
        self, *, train_scenes: Count, val_scenes: Count, test_scenes: Count, **options: Unpack[KindOptions]
    ) -> None:
        super().__init__(
            train_scenes=train_scenes,
            val_scenes=val_scenes,
            test_scenes=test_scenes,
            object_weights=(0, 1, 3),  # a single object has no relations
            **options,
        )

    def sample(self, keys: Keys) -> Record:
        facts = tell_story(self.scene(keys), numpy_rng("summary of a scene", *keys))
        kinds = dict.fromkeys(kind for fact in facts for kind in (fact.subject, fact.landmark))
        counts = Counter(kind.shape for kind in kinds)  # in order of their first mention
        shapes = [f"a {shape}" if n == 1 else f"{NUMBERS[n]} {pluralize(shape)}" for shape, n in counts.items()]
        summary = " and ".join(filter(None, (", ".join(shapes[:-1]), shapes[-1])))
        return keys.record({"text": " ".join(map(str, facts)), "translation": summary})
