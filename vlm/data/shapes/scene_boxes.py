"""Scenes of up to five coloured shapes with the box of each, for detection."""

from collections.abc import Sequence
from typing import ClassVar, Unpack

import numpy as np

from vlm.data.boxes import ImageBoxes, LabeledBox
from vlm.data.records import Record
from vlm.data.shapes.scene_source import Keys, SceneOptions, SceneSource
from vlm.data.shapes.scenes import Combination, SceneObject, find_box, scatter_objects


class SceneBoxes(SceneSource):
    """Scenes with boxes; the class of an object is its colour and shape, such as "red circle".

    Objects are placed without regard to their relations, and their boxes may overlap by little. Splits share no
    combination of objects.

    Args:
        options: See SceneSource; max_objects is at most 5, and object_weights has a number for each number of objects.
    """

    holds = ("image", "boxes")
    name = "boxes of shapes"
    most_objects: ClassVar[int] = 5

    def __init__(self, **options: Unpack[SceneOptions]) -> None:
        super().__init__(**options)
        self.classes: Sequence[str] = sorted({class_of(kind.color, kind.shape) for kind in self.kinds})

    def place(self, kinds: Combination, rng: np.random.Generator) -> tuple[SceneObject, ...]:
        return scatter_objects(kinds, self.image_size, rng)

    def sample(self, keys: Keys) -> Record:
        scene, side = self.scene(keys), self.image_size
        boxes = [
            LabeledBox(class_of(placed.kind.color, placed.kind.shape), tuple(map(float, find_box(placed, side))))  # type: ignore[arg-type]
            for placed in scene.objects
        ]
        return keys.record({"boxes": ImageBoxes((side, side), tuple(boxes))}, scene)


def class_of(color: str, shape: str) -> str:
    return f"{color} {shape}"
