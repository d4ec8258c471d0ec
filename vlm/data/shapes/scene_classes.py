"""The data set of single coloured shapes that the project draws itself, to be told apart by colour and shape."""

from collections.abc import Sequence
from functools import partial
from itertools import product

from vlm.data.records import NAMES, Record, Source, Split
from vlm.data.shapes.scene_captions import BACKGROUND, check_scenes
from vlm.data.shapes.scenes import Kind, Scene, draw, place
from vlm.errors import Count, UserError
from vlm.randomness import numpy_rng


class ShapeClassesSplit(Split):
    """One split: every sample is drawn when it is asked for, from nothing but its keys.

    Args:
        name: Name of the split, one of the keys of a sample.
        seed: Seed of the source.
        fresh: Whether samples differ from epoch to epoch; if not, the epoch is ignored.
        image_size: Side of the image in pixels.
        length: How many samples an epoch has.
        classes: Names of the classes.
        kinds: Looks of the classes: for each class, its kinds, which differ in size.
    """

    def __init__(
        self,
        *,
        name: str,
        seed: int,
        fresh: bool,
        image_size: int,
        length: int,
        classes: Sequence[str],
        kinds: Sequence[Sequence[Kind]],
    ) -> None:
        self.name, self.seed, self.fresh = name, seed, fresh
        self.image_size, self.classes, self.kinds, self._length = image_size, classes, kinds, length

    def __len__(self) -> int:
        return self._length

    def record(self, index: int, epoch: int = 0) -> Record:
        """A shape on its background. Classes come in turn, so that all are as frequent in any number of samples."""
        label = index % len(self.kinds)
        name = f"{self.name}-{epoch if self.fresh else 0}-{index:06d}"
        scene = self.scene(name, label)
        known = {"label": label, "class": self.classes[label]}
        return Record(name, known, partial(draw, scene), None, lambda: str(scene))

    def scene(self, name: str, label: int) -> Scene:
        """The scene of a sample's name and class."""
        rng = numpy_rng("shape", self.seed, name)
        sizes = self.kinds[label]
        which, *tone = rng.random(4).tolist()
        objects = place((sizes[int(which * len(sizes))],), self.image_size, rng)
        red, green, blue = (BACKGROUND[int(part * len(BACKGROUND))] for part in tone)
        return Scene(objects, (red, green, blue), self.image_size)


class ShapeClasses(Source):
    """The source of all three splits; ``train`` shows fresh samples every epoch, ``val`` and ``test`` the same.

    A class is a colour and a shape, such as "red circle"; its objects differ in size and place.

    Args:
        seed: Seed of every sample.
        image_size: Side of the images in pixels.
        shapes, colors, sizes: Names that `vlm.data.shapes.scenes` knows.
        train_scenes, val_scenes, test_scenes: How many samples (an epoch of) each split has.
    Raises:
        UserError: If a name is unknown or given twice, or a number is too small.
    """

    holds = ("image", "label")
    name = "shape_classes"
    splits = NAMES
    drawn = True

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
        self.lengths = {"train": train_scenes, "val": val_scenes, "test": test_scenes}
        check_scenes(image_size=image_size, shapes=shapes, colors=colors, sizes=sizes, lengths=self.lengths)
        looks = list(product(colors, shapes))
        if len(looks) < 2:
            raise UserError("data.source: one colour of one shape is one class; add to data.source.shapes or .colors")
        self.seed, self.image_size = seed, image_size
        self.classes = [f"{color} {shape}" for color, shape in looks]
        self._kinds = [[Kind(size, color, shape) for size in sizes] for color, shape in looks]

    def open(self, name: str) -> ShapeClassesSplit:
        return ShapeClassesSplit(
            name=name,
            seed=self.seed,
            fresh=name == "train",
            image_size=self.image_size,
            length=self.lengths[name],
            classes=self.classes,
            kinds=self._kinds,
        )
