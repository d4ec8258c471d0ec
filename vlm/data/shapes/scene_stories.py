"""Scenes told in sentences, and questions about where things stand: a task of reading that needs no files."""

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np

from vlm.data.records import NAMES, Record, Source, Split
from vlm.data.shapes.scene_captions import Shapes, ShapesSplit
from vlm.data.shapes.scene_pairs import INVERSE
from vlm.data.shapes.scenes import Kind, Placed, Scene, relations
from vlm.errors import Count
from vlm.randomness import numpy_rng

UNANSWERABLE = 1 / 3  # share of questions whose answer the scene does not hold


class Fact(NamedTuple):
    """A sentence of a story: where its subject stands towards another object."""

    subject: Kind
    relation: str
    other: Kind

    def __str__(self) -> str:
        return f"the {self.subject} is {self.relation} the {self.other}."


class Asked(NamedTuple):
    """A question: which object stands so towards this one, and its answer with its place in the story."""

    relation: str
    other: Kind
    answer: str = ""
    start: int = 0

    def __str__(self) -> str:
        return f"what is {self.relation} the {self.other}?"


def tell(scene: Scene, rng: np.random.Generator) -> list[Fact]:
    """A sentence about each pair of objects, in any order, of either one, and one of the relations that hold."""
    pairs = list(combinations(scene.objects, 2))
    facts = []
    for at in rng.permutation(len(pairs)):
        one, other = (pairs[at][n] for n in rng.permutation(2))
        true = relations(one, other, scene.image_size)
        facts.append(Fact(one.kind, true[rng.integers(len(true))], other.kind))
    return facts


def answerable(scene: Scene, facts: list[Fact]) -> Iterator[Asked]:
    """The questions that a sentence of the story answers, and that have no other answer in the scene."""
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
    """The questions about the scene's objects that no object answers."""
    kinds = [placed.kind for placed in scene.objects]
    return [Asked(relation, kind) for relation in INVERSE for kind in kinds if not _standing(scene, relation, kind)]


def _standing(scene: Scene, relation: str, kind: Kind) -> list[Placed]:
    """The objects that stand so towards the one of this kind."""
    (other,) = (placed for placed in scene.objects if placed.kind == kind)
    others = (placed for placed in scene.objects if placed.kind != kind)
    return [placed for placed in others if relation in relations(placed, other, scene.image_size)]


class StorySplit(Split):
    """One story of each scene of a split, with a question; every one is a function of its keys alone.

    Args:
        name: Name of the split.
        scenes: The scenes.
    """

    def __init__(self, *, name: str, scenes: ShapesSplit) -> None:
        self.name, self.scenes, self.fresh = name, scenes, scenes.fresh

    def __len__(self) -> int:
        return len(self.scenes)

    def record(self, index: int, epoch: int = 0) -> Record:
        epoch = epoch if self.fresh else 0
        scene = self.scenes.scene(epoch, index)
        rng = numpy_rng("story of a scene", self.scenes.seed, self.name, epoch, index)
        facts = tell(scene, rng)
        questions = [] if rng.random() < UNANSWERABLE else list(answerable(scene, facts))
        questions = questions or unanswerable(scene)
        asked = questions[rng.integers(len(questions))]
        known = {"question": str(asked), "context": " ".join(map(str, facts))}
        known_answers = [(asked.answer, asked.start)] if asked.answer else []
        return Record(f"{self.name}-{epoch}-{index:06d}", {**known, "answers": known_answers})


class SceneStories(Source):
    """The source of all three splits; ``train`` has fresh stories every epoch, ``val`` and ``test`` the same.

    No two splits share a combination of kinds.

    Args:
        seed, shapes, colors, sizes, max_objects: As in `vlm.data.shapes.scene_captions.Shapes`.
        train_stories, val_stories, test_stories: How many stories (an epoch of) each split has.
    Raises:
        UserError: As Shapes.
    """

    holds = ("question", "context", "answers")
    name = "stories of scenes"
    splits = NAMES
    drawn = True

    def __init__(
        self,
        *,
        seed: int,
        shapes: list[str],
        colors: list[str],
        sizes: list[str],
        max_objects: Count,
        train_stories: Count,
        val_stories: Count,
        test_stories: Count,
    ) -> None:
        self._source = Shapes(
            seed=seed,
            shapes=shapes,
            colors=colors,
            sizes=sizes,
            max_objects=max_objects,
            object_weights=(0, 1, 3),  # a single object stands nowhere towards another
            train_scenes=train_stories,
            val_scenes=val_stories,
            test_scenes=test_stories,
            captions_per_image=None,
        )

    def open(self, name: str) -> StorySplit:
        return StorySplit(name=name, scenes=self._source.open(name))
