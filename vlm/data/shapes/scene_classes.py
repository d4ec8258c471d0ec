"""Classification of single coloured shapes, a generated data set."""

from itertools import product

from vlm.data.records import Record
from vlm.data.shapes.drawn import DrawnSource, Keys
from vlm.data.shapes.scene_source import background, check_scenes
from vlm.data.shapes.scenes import Kind, Scene, place
from vlm.errors import Count, UserError
from vlm.randomness import numpy_rng


class ShapeClasses(DrawnSource):
    """Single shapes. A class is a colour and a shape, such as "red circle"; objects vary in size and position.

    Args:
        seed: Seed of every sample.
        image_size: Side of the images in pixels.
        shapes, colors, sizes: Names that `vlm.data.shapes.scenes` knows.
        train_scenes, val_scenes, test_scenes: Number of samples per split (and epoch).
    Raises:
        UserError: A name is unknown or repeated, or images are too small.
    """

    holds = ("image", "label")
    name = "shape_classes"

    def __init__(
        self,
        *,
        seed: int,
        image_size: Count = 64,
        shapes: list[str],
        colors: list[str],
        sizes: list[str],
        train_scenes: Count,
        val_scenes: Count,
        test_scenes: Count,
    ) -> None:
        super().__init__(seed, {"train": train_scenes, "val": val_scenes, "test": test_scenes})
        check_scenes(image_size=image_size, shapes=shapes, colors=colors, sizes=sizes)
        looks = list(product(colors, shapes))
        if len(looks) < 2:
            raise UserError("data.source: one colour of one shape is one class; add to data.source.shapes or .colors")
        self.image_size, self.classes = image_size, [f"{color} {shape}" for color, shape in looks]
        self._kinds = [[Kind(size, color, shape) for size in sizes] for color, shape in looks]

    def sample(self, keys: Keys) -> Record:
        """A shape on its background. Classes alternate, so that all have the same frequency."""
        label = keys.place % len(self.classes)
        rng, kinds = numpy_rng("shape", keys.seed, keys.id), self._kinds[label]
        which, *tone = rng.random(4).tolist()
        objects = place((kinds[int(which * len(kinds))],), self.image_size, rng)
        scene = Scene(objects, background(tone), self.image_size)
        return keys.record({"label": label, "class": self.classes[label]}, scene)
