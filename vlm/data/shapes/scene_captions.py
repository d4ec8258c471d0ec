"""The data set of scenes that the project draws itself: one to three coloured shapes and where they stand.

A *combination* is the set of kinds in a scene. Splits are disjoint in combinations, so a model cannot score on ``val``
or ``test`` by recalling pictures it was trained on. `scenes` says what a scene is and what is true of it.
"""

import argparse
import json
from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate, combinations, product
from pathlib import Path

from vlm.data.records import NAMES, Record, Source, Split
from vlm.data.shapes.scenes import COLORS, RADII, SHAPES, Combination, Kind, Scene, draw, place, valid_captions
from vlm.errors import Count, UserError, print_error
from vlm.randomness import key, numpy_rng

MIN_IMAGE_SIZE = 32

# Each channel of the background is drawn from these; dark, so that every colour of an object stands out.
BACKGROUND = range(52, 69)


def assign(kinds: list[Kind], count: int, seed: int) -> dict[str, list[Combination]]:
    """Deals the combinations of so many kinds: a tenth each to ``val`` and ``test``, the others to ``train``.

    They are dealt in the order of a hash of seed and combination. Of two or more kinds, the last combination that
    holds a kind stays in ``train``, so that no kind is new after training.
    """
    ranked = sorted(combinations(sorted(kinds), count), key=lambda kinds: key("combination", seed, *map(str, kinds)))
    kept = set({kind: combination for combination in ranked for kind in combination}.values())
    free = ranked if count == 1 else [combination for combination in ranked if combination not in kept]
    tenth = max(1, len(ranked) // 10)
    held_out = {"val": free[:tenth], "test": free[tenth : 2 * tenth]}
    taken = set(free[: 2 * tenth])
    return {"train": [combination for combination in ranked if combination not in taken], **held_out}


class ShapesSplit(Split):
    """One split: every sample is drawn when it is asked for, from nothing but its keys.

    Args:
        name: Name of the split, one of the keys of a sample.
        seed: Seed of the source.
        fresh: Whether samples differ from epoch to epoch; if not, the epoch is ignored.
        image_size: Side of the image in pixels.
        length: How many scenes an epoch has.
        choices: The combinations of this split with the relative frequency of each list of them.
        captions_per_image: How many of the valid captions `captions` returns at most; None for all.
    """

    def __init__(
        self,
        *,
        name: str,
        seed: int,
        fresh: bool,
        image_size: int,
        length: int,
        choices: list[tuple[float, list[Combination]]],
        captions_per_image: int | None,
    ) -> None:
        self.name = name
        self.seed = seed
        self.fresh = fresh
        self.image_size = image_size
        self.captions_per_image = captions_per_image
        self._length = length
        self._combinations = [dealt for _, dealt in choices]
        self._bounds = list(accumulate(weight for weight, _ in choices))

    def __len__(self) -> int:
        return self._length

    def _key(self, epoch: int, index: int) -> tuple[str, int, int]:
        return self.name, epoch if self.fresh else 0, index

    def scene(self, epoch: int, index: int) -> Scene:
        """The scene of these keys."""
        rng = numpy_rng("scene", self.seed, *self._key(epoch, index))
        count, which, *tone = rng.random(5).tolist()
        choice = self._combinations[bisect(self._bounds, count * self._bounds[-1])]
        objects = place(choice[int(which * len(choice))], self.image_size, rng)
        red, green, blue = (BACKGROUND[int(part * len(BACKGROUND))] for part in tone)
        return Scene(objects, (red, green, blue), self.image_size)

    def record(self, index: int, epoch: int = 0) -> Record:
        """The scene with the captions that a row is trained on: all the valid ones, or as many of them as asked for."""
        scene = self.scene(epoch, index)
        valid = valid_captions(scene)
        captions = valid
        if self.captions_per_image is not None and len(valid) > self.captions_per_image:
            rng = numpy_rng("scene captions", self.seed, *self._key(epoch, index))
            captions = [valid[at] for at in sorted(rng.permutation(len(valid))[: self.captions_per_image])]
        known = {"captions": captions, "references": valid}
        return Record(self.name_of(epoch, index), known, partial(draw, scene), None, lambda: str(scene))

    def name_of(self, epoch: int, index: int) -> str:
        """The id of the scene of these keys."""
        name, fresh_epoch, _ = self._key(epoch, index)
        return f"{name}-{fresh_epoch}-{index:06d}"


class Shapes(Source):
    """The source of all three splits; ``train`` shows fresh scenes every epoch, ``val`` and ``test`` the same.

    Args:
        seed: Seed of everything: which combinations are held out, and every scene.
        image_size: Side of the images in pixels.
        shapes: Names out of `SHAPES`.
        colors: Names out of `COLORS`.
        sizes: Names out of `RADII`.
        max_objects: The most objects a scene has, 2 or 3.
        object_weights: Relative frequencies of scenes of 1, 2 and 3 objects; those beyond `max_objects` are not used.
        train_scenes: How many scenes an epoch of training has.
        val_scenes: How many scenes validation has.
        test_scenes: How many scenes the test has.
        captions_per_image: The most captions a row is trained on, drawn from all that are valid; None for all.

    Raises:
        UserError: If a name is unknown or given twice, a number is out of range, or a split would be empty.
    """

    holds = ("image", "captions")
    name = "shapes"
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
        max_objects: Count = 3,
        object_weights: Sequence[float] = (1, 2, 1),
        train_scenes: Count,
        val_scenes: Count,
        test_scenes: Count,
        captions_per_image: Count | None,
    ) -> None:
        self.lengths = {"train": train_scenes, "val": val_scenes, "test": test_scenes}
        check_scenes(image_size=image_size, shapes=shapes, colors=colors, sizes=sizes, lengths=self.lengths)
        if captions_per_image is not None:
            check_least("captions_per_image", captions_per_image, 1)
        self.seed = seed
        self.image_size = image_size
        self.captions_per_image = captions_per_image
        weights = _object_weights(max_objects, object_weights)
        kinds = [Kind(*parts) for parts in product(sizes, colors, shapes)]
        dealt = [(weight, assign(kinds, count, seed)) for count, weight in weights.items()]
        self._choices = {
            split: [(weight, deal[split]) for weight, deal in dealt if deal[split]] for split in self.splits
        }
        if len(kinds) < max(weights) or not all(self._choices.values()):
            raise UserError(
                f"data.source: {len(kinds)} kinds of object are too few for three splits that share no combination; "
                "add to data.source.shapes, data.source.colors or data.source.sizes"
            )

    def open(self, name: str) -> ShapesSplit:
        return ShapesSplit(
            name=name,
            seed=self.seed,
            fresh=name == "train",
            image_size=self.image_size,
            length=self.lengths[name],
            choices=self._choices[name],
            captions_per_image=self.captions_per_image,
        )


def check_scenes(
    *,
    image_size: int,
    shapes: Sequence[str],
    colors: Sequence[str],
    sizes: Sequence[str],
    lengths: Mapping[str, int],
) -> None:
    """Refuses what no source of scenes can draw.

    Args:
        lengths: Samples of each split.
    Raises:
        UserError: A name is unknown or given twice, or a number is too small.
    """
    for at, names, known in (("shapes", shapes, SHAPES), ("colors", colors, COLORS), ("sizes", sizes, RADII)):
        _check_names(at, names, known)
    check_least("image_size", image_size, MIN_IMAGE_SIZE)
    for split, length in lengths.items():
        check_least(f"{split}_scenes", length, 1)


def check_least(at: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"data.source.{at}: {value} is too small; give at least {least}")


def _check_names(at: str, names: Sequence[str], known: Collection[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        fault = f"unknown {unknown[0]!r}" if unknown else "is empty"
        raise UserError(f"data.source.{at}: {fault}; the known ones are {', '.join(known)}")
    if len(set(names)) < len(names):
        raise UserError(f"data.source.{at}: a name stands there twice in {', '.join(names)}; give each once")


def _object_weights(max_objects: int, weights: Sequence[float]) -> dict[int, float]:
    """Frequencies of scenes by their number of objects, without those that never occur."""
    if max_objects not in (2, 3):
        # With single objects alone, a kind that is held out would never be seen in training.
        raise UserError(f"data.source.max_objects: {max_objects} is not possible; give 2 or 3")
    if len(weights) < max_objects or min(weights) < 0 or sum(weights[1:max_objects]) <= 0:
        raise UserError(
            f"data.source.object_weights: {list(weights)} does not fit; give {max_objects} numbers, none negative, "
            "and not all 0 after the first"
        )
    return {count: weight for count, weight in enumerate(weights[:max_objects], 1) if weight > 0}


def write_coco(source: Shapes, folder: Path | str, split: str, count: int) -> Path:
    """Writes the first scenes of a split as PNG files, and their captions beside them in COCO's annotation format.

    Returns:
        The annotation file, ``captions.json`` in the folder; its file names are relative to the folder.

    Raises:
        UserError: If there is no such split, it has fewer scenes, or the folder cannot be written.
    """
    samples = source.split(split)
    if not 1 <= count <= len(samples):
        raise UserError(f"cannot write {count} scenes of {split!r}; it has {len(samples)}, so give 1 to {len(samples)}")
    folder = Path(folder)
    images: list[dict[str, int | str]] = []
    annotations: list[dict[str, int | str]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            record, side = samples.record(index), source.image_size
            file_name = f"{record.id}.png"
            record.image().save(folder / file_name)
            images.append({"id": index + 1, "file_name": file_name, "width": side, "height": side})
            for caption in record["captions"]:
                annotations.append({"id": len(annotations) + 1, "image_id": index + 1, "caption": caption})
        target = folder / "captions.json"
        target.write_text(json.dumps({"images": images, "annotations": annotations}, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot write there ({error.strerror}); give another folder", 1) from error
    return target


def main(argv: list[str] | None = None) -> int:
    """Writes a few scenes to a folder and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vlm.data.shapes.scene_captions", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split", choices=NAMES, default="test")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    lengths = {f"{split}_scenes": max(1, args.count) for split in NAMES}
    try:
        source = Shapes(
            seed=args.seed,
            image_size=args.image_size,
            shapes=["circle", "triangle", "cross"],
            max_objects=2,
            colors=["red", "green", "blue", "yellow"],
            sizes=["small", "large"],
            captions_per_image=5,
            **lengths,
        )
        print(write_coco(source, args.folder, args.split, args.count))
    except UserError as error:
        print_error(error)
        return error.status
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
