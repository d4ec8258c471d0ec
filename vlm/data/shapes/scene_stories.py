"""Stories about scenes, with questions about positions or with summaries."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple, Unpack

import numpy as np

from vlm.data.records import Record
from vlm.data.shapes.scene_labels import INVERSE
from vlm.data.shapes.scene_questions import NUMBERS, plural
from vlm.data.shapes.scene_source import Keys, KindOptions, SceneSource
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
        facts = tell(self.scene(keys), numpy_rng("summary of a scene", *keys))
        return keys.record({"text": " ".join(map(str, facts)), "translation": summary(facts)})


def summary(facts: list[Fact]) -> str:
    """The number of objects of each shape in a story, in order of their first mention."""
    kinds = dict.fromkeys(kind for fact in facts for kind in (fact.subject, fact.other))
    counts = Counter(kind.shape for kind in kinds)
    parts = [f"a {shape}" if count == 1 else f"{NUMBERS[count]} {plural(shape)}" for shape, count in counts.items()]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
