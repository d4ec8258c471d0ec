"""Scenes of one to three coloured shapes, generated from keys: the base of sources about them."""

from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, combinations, product
from typing import Any, ClassVar, NamedTuple, NotRequired, TypedDict

import numpy as np

from vlm.data.records import NAMES, Record, Source, Split
from vlm.data.shapes.scenes import (
    COLORS,
    RADII,
    SHAPES,
    Combination,
    Kind,
    Scene,
    SceneObject,
    draw_scene,
    place_objects,
)
from vlm.errors import Count, UserError
from vlm.randomness import key, numpy_rng


class Keys(NamedTuple):
    """Everything that determines a sample; epoch is 0 if all epochs have the same samples."""

    seed: int
    split: str
    epoch: int
    place: int  # index in the split

    @property
    def id(self) -> str:
        return f"{self.split}-{self.epoch}-{self.place:06d}"

    def record(self, values: Mapping[str, Any], scene: Scene | None = None) -> Record:
        """The record of a sample, with the image of its scene if it has one."""
        if scene is None:
            return Record(self.id, values)
        return Record(self.id, values, partial(draw_scene, scene), read_stamp=lambda: str(scene))


class GeneratedSource(Source):
    """A source with three splits; ``train`` has fresh samples every epoch, ``val`` and ``test`` are fixed.

    A subclass defines `sample`.

    Args:
        seed: Seed of all samples.
        lengths: Number of samples per split (and epoch).
    """

    splits = NAMES
    is_synthetic = True

    def __init__(self, seed: int, lengths: Mapping[str, int]) -> None:
        self.seed, self.lengths = seed, lengths

    def open(self, name: str) -> "GeneratedSplit":
        return GeneratedSplit(self, name)

    def sample(self, keys: Keys) -> Record:
        """Generates a sample."""
        raise TypeError(f"{type(self).__name__} draws no sample")


class GeneratedSplit(Split):
    """A split whose samples are generated on demand."""

    def __init__(self, source: GeneratedSource, name: str) -> None:
        self.source, self.name, self.fresh = source, name, name == "train"

    def __len__(self) -> int:
        return self.source.lengths[self.name]

    def keys(self, index: int, epoch: int = 0) -> Keys:
        """The keys of a sample."""
        return Keys(self.source.seed, self.name, epoch if self.fresh else 0, index)

    def record(self, index: int, epoch: int = 0) -> Record:
        return self.source.sample(self.keys(index, epoch))


MIN_IMAGE_SIZE = 32

# Each background channel is drawn from these dark values, so that all object colours stand out.
BACKGROUND = range(52, 69)


def assign_combinations(kinds: list[Kind], count: int, seed: int) -> dict[str, list[Combination]]:
    """Assigns combinations of `count` kinds to splits: a tenth each to ``val`` and ``test``, the rest to ``train``.

    The order is a hash of seed and combination. With two or more kinds, the last combination of each kind stays in
    ``train``, so that training contains every kind.
    """
    ranked = sorted(combinations(sorted(kinds), count), key=lambda kinds: key("combination", seed, *map(str, kinds)))
    required = set({kind: combination for combination in ranked for kind in combination}.values())
    free = ranked if count == 1 else [combination for combination in ranked if combination not in required]
    tenth = max(1, len(ranked) // 10)
    held_out = {"val": free[:tenth], "test": free[tenth : 2 * tenth]}
    held_out_combinations = set(free[: 2 * tenth])
    return {"train": [combination for combination in ranked if combination not in held_out_combinations], **held_out}


def background_color(tone: Sequence[float]) -> tuple[int, int, int]:
    """A background colour from three numbers below 1."""
    red, green, blue = (BACKGROUND[int(part * len(BACKGROUND))] for part in tone)
    return red, green, blue


class KindOptions(TypedDict):
    """Arguments that determine the kinds of objects; see SceneSource."""

    seed: int
    shapes: list[str]
    colors: list[str]
    sizes: list[str]
    max_objects: NotRequired[Count]


class SceneOptions(KindOptions):
    """Arguments of SceneSource, which documents them and has their defaults."""

    image_size: NotRequired[Count]
    object_weights: NotRequired[Sequence[float]]
    train_scenes: Count
    val_scenes: Count
    test_scenes: Count


class SceneSource(GeneratedSource):
    """Base of sources about scenes; a subclass defines `sample` using `scene`.

    Attributes:
        most_objects: Maximum of max_objects.
    Args:
        seed: Seed of the split of combinations and of every scene.
        image_size: Side of the images in pixels.
        shapes: Names in `SHAPES`.
        colors: Names in `COLORS`.
        sizes: Names in `RADII`.
        max_objects: Maximum number of objects per scene, from 2 to `most_objects`.
        object_weights: Relative frequencies of scenes with 1, 2 and 3 objects; those beyond `max_objects` are ignored.
        train_scenes, val_scenes, test_scenes: Number of scenes per split (and epoch).
    Raises:
        UserError: A name is unknown or repeated, a number is out of range, or a split would be empty.
    """

    most_objects: ClassVar[int] = 3

    def __init__(
        self,
        *,
        seed: int,
        image_size: Count = 64,
        shapes: list[str],
        colors: list[str],
        sizes: list[str],
        max_objects: Count = 3,
        object_weights: Sequence[float] = (1, 2, 1),
        train_scenes: Count,
        val_scenes: Count,
        test_scenes: Count,
    ) -> None:
        super().__init__(seed, {"train": train_scenes, "val": val_scenes, "test": test_scenes})
        check_scenes(image_size=image_size, shapes=shapes, colors=colors, sizes=sizes)
        self.image_size, self.shapes, self.colors, self.sizes = image_size, shapes, colors, sizes
        self.max_objects, self.kinds = max_objects, [Kind(*parts) for parts in product(sizes, colors, shapes)]
        weights = _object_weights(max_objects, object_weights, self.most_objects)
        assigned = [(weight, assign_combinations(self.kinds, count, seed)) for count, weight in weights.items()]
        # Of each split, the combinations by number of objects, and the sums of their frequencies.
        self._choices = {}
        for split in self.splits:
            choices = [(weight, by_split[split]) for weight, by_split in assigned if by_split[split]]
            bounds = list(accumulate(weight for weight, _ in choices))
            self._choices[split] = [combinations for _, combinations in choices], bounds
        if len(self.kinds) < max(weights) or not all(bounds for _, bounds in self._choices.values()):
            raise UserError(
                f"data.source: {len(self.kinds)} kinds of object are too few for three splits that share no "
                "combination; add to data.source.shapes, data.source.colors or data.source.sizes"
            )

    def scene(self, keys: Keys) -> Scene:
        """Generates a scene."""
        rng, (combinations, bounds) = numpy_rng("scene", *keys), self._choices[keys.split]
        count, which, *tone = rng.random(5).tolist()
        choice = combinations[bisect(bounds, count * bounds[-1])]
        objects = self.place(choice[int(which * len(choice))], rng)
        return Scene(objects, background_color(tone), self.image_size)

    def place(self, kinds: Combination, rng: np.random.Generator) -> tuple[SceneObject, ...]:
        """Places the objects of a scene; by default so that every pair has an unambiguous relation."""
        return place_objects(kinds, self.image_size, rng)


def check_scenes(
    *, shapes: Sequence[str], colors: Sequence[str], sizes: Sequence[str], image_size: int = MIN_IMAGE_SIZE
) -> None:
    """Checks the options of a source of scenes.

    Raises:
        UserError: A name is unknown or repeated, or images are too small.
    """
    for at, names, choices in (("shapes", shapes, SHAPES), ("colors", colors, COLORS), ("sizes", sizes, RADII)):
        unknown = [name for name in names if name not in choices]
        if unknown or not names:
            fault = f"unknown {unknown[0]!r}" if unknown else "is empty"
            raise UserError(f"data.source.{at}: {fault}; choose from {', '.join(choices)}")
        if len(set(names)) < len(names):
            raise UserError(f"data.source.{at}: a name is repeated in {', '.join(names)}; give each once")
    if image_size < MIN_IMAGE_SIZE:
        raise UserError(f"data.source.image_size: {image_size} is too small; give at least {MIN_IMAGE_SIZE}")


def _object_weights(max_objects: int, weights: Sequence[float], most: int) -> dict[int, float]:
    """Frequencies of scenes by number of objects, without zeros."""
    if not 2 <= max_objects <= most:
        # With single objects only, training would never contain the held-out kinds.
        allowed = "2 or 3" if most == 3 else f"2 to {most}"
        raise UserError(f"data.source.max_objects: {max_objects} is invalid; give {allowed}")
    if len(weights) < max_objects or min(weights) < 0 or sum(weights[1:max_objects]) <= 0:
        raise UserError(
            f"data.source.object_weights: {list(weights)} is invalid; give {max_objects} numbers, none negative, "
            "and not all 0 after the first"
        )
    return {count: weight for count, weight in enumerate(weights[:max_objects], 1) if weight > 0}
