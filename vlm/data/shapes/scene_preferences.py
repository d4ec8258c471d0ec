"""Pairs of captions of scenes of coloured shapes: a right one, and one that is right but for one word."""

from collections.abc import Iterator
from typing import Unpack

from vlm.data.records import Preference, Record
from vlm.data.shapes.scene_source import Keys, SceneOptions, SceneSource
from vlm.data.shapes.scenes import Kind, Statement, list_statements
from vlm.errors import Count
from vlm.randomness import numpy_rng

OPPOSITES = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


class ScenePreferences(SceneSource):
    """Scenes with pairs of captions without a prompt.

        chosen    a small red cross left of a large blue circle
        rejected  a small red cross left of a large blue triangle

    The rejected caption differs in the size, color or shape of one object, or in the relation, and is not true.

    Args:
        pairs_per_image: Number of pairs per training scene, duplicates removed; other splits have one.
        options: See SceneSource.
    """

    holds = ("image", "pairs")
    name = "preferences about shapes"

    def __init__(self, *, pairs_per_image: Count = 1, **options: Unpack[SceneOptions]) -> None:
        super().__init__(**options)
        self.pairs_per_image = pairs_per_image

    def sample(self, keys: Keys) -> Record:
        scene, rng = self.scene(keys), numpy_rng("scene preferences", keys.seed, keys.id)
        statements = list_statements(scene)
        true, pairs = set(map(str, statements)), list[Preference]()
        for _ in range(self.pairs_per_image if keys.split == "train" else 1):
            statement = statements[rng.integers(len(statements))]
            by_attribute = [
                [str(changed) for changed in changes if str(changed) not in true]
                for changes in self._change_attributes(statement)
            ]
            attributes = [captions for captions in by_attribute if captions]
            captions = attributes[rng.integers(len(attributes))]
            pairs.append(Preference((), str(statement), captions[rng.integers(len(captions))]))
        return keys.record({"pairs": list(dict.fromkeys(pairs))}, scene)

    def _change_attributes(self, statement: Statement) -> Iterator[list[Statement]]:
        """Yields the statements that differ in one size, in one color, in one shape, and in one relation."""
        subject, places = statement
        choices = {"size": self.sizes, "color": self.colors, "shape": self.shapes}
        for name, values in choices.items():

            def change(kind: Kind, name: str = name, values: list[str] = values) -> list[Kind]:
                kinds = [kind._replace(**{name: value}) for value in values]
                return [changed for changed in kinds if changed != kind]

            yield [
                *(Statement(kind, places) for kind in change(subject)),
                *(
                    Statement(subject, (*places[:at], (relation, kind), *places[at + 1 :]))
                    for at, (relation, landmark) in enumerate(places)
                    for kind in change(landmark)
                ),
            ]
        yield [
            Statement(subject, (*places[:at], (OPPOSITES[relation], landmark), *places[at + 1 :]))
            for at, (relation, landmark) in enumerate(places)
        ]
