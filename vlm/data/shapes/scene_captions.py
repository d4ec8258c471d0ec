"""Captions and short texts about generated scenes; the default data set."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Unpack

from vlm.data.records import NAMES, ListSplit, Record, Source, Split, SplitSubset
from vlm.data.shapes.scene_source import GeneratedSplit, Keys, KindOptions, SceneOptions, SceneSource
from vlm.data.shapes.scenes import Kind, valid_captions
from vlm.errors import Count, UserError, print_error
from vlm.randomness import numpy_rng


class Shapes(SceneSource):
    """Scenes with captions.

    Args:
        captions_per_image: Maximum number of captions per training row, drawn from all valid ones; None for all.
        options: See SceneSource.
    """

    holds = ("image", "captions")
    name = "shapes"

    def __init__(self, *, captions_per_image: Count | None, **options: Unpack[SceneOptions]) -> None:
        super().__init__(**options)
        self.captions_per_image = captions_per_image

    def sample(self, keys: Keys) -> Record:
        """The scene with its training captions: all valid ones, or `captions_per_image` of them."""
        scene = self.scene(keys)
        captions = valid = valid_captions(scene)
        if self.captions_per_image is not None and len(valid) > self.captions_per_image:
            order = numpy_rng("scene captions", *keys).permutation(len(valid))
            captions = [valid[at] for at in sorted(order[: self.captions_per_image])]
        return keys.record({"captions": captions, "references": valid}, scene)


def write_coco(source: Shapes, folder: Path | str, split: str, count: int) -> Path:
    """Writes the first scenes of a split as PNG files with captions in COCO's annotation format.

    Returns:
        The annotation file, ``captions.json`` in the folder; its file names are relative to the folder.

    Raises:
        UserError: The split does not exist, has fewer scenes, or the folder cannot be written.
    """
    samples = source.split(split)
    if not 1 <= count <= len(samples):
        raise UserError(f"cannot write {count} scenes of {split!r}; give 1 to {len(samples)}")
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
        raise UserError(f"{folder}: cannot write ({error.strerror}); give another folder", 1) from error
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


TRIES = 100  # scenes drawn for each one needed, before giving up


class DistinctShapes(Shapes):
    """Scenes like Shapes; in validation and test, no two have the same objects.

    Args:
        options: See Shapes.
    Raises:
        UserError: As in Shapes.
    """

    name = "distinct shapes"

    def open(self, name: str) -> Split:  # type: ignore[override]
        split = super().open(name)
        return split if split.fresh else SplitSubset(split, self._distinct(split))

    def _distinct(self, split: GeneratedSplit) -> list[int]:
        """Indices of the first scenes with distinct objects, as many as the split needs.

        Raises:
            UserError: There are too few.
        """
        chosen: dict[frozenset[Kind], int] = {}
        for index in range(TRIES * len(split)):
            chosen.setdefault(frozenset(kind for kind, _, _ in self.scene(split.keys(index)).objects), index)
            if len(chosen) == len(split):
                return list(chosen.values())
        raise UserError(
            f"data.source.{split.name}_scenes: only {len(chosen)} of {len(split)} scenes have distinct objects; "
            "reduce it, or add to data.source.shapes, data.source.colors or data.source.sizes"
        )


class SceneText(Source):
    """Short texts about scenes of coloured shapes, the same in every run; splits share no combination of shapes.

    A document describes a few scenes in true sentences, one line each.

    Args:
        scenes: Number of scenes per document.
        train_documents, val_documents, test_documents: Number of documents per split.
        options: See `vlm.data.shapes.scene_source.SceneSource`.
    """

    holds = ("document",)
    name = "scenes in words"
    splits = NAMES

    def __init__(
        self,
        *,
        scenes: Count,
        train_documents: Count,
        val_documents: Count,
        test_documents: Count,
        **options: Unpack[KindOptions],
    ) -> None:
        self._source = source = Shapes(
            train_scenes=train_documents * scenes,
            val_scenes=val_documents * scenes,
            test_scenes=test_documents * scenes,
            captions_per_image=2,
            **options,
        )
        self._scenes = scenes
        self._counts = {"train": train_documents, "val": val_documents, "test": test_documents}
        kinds = [source.seed, source.max_objects, source.shapes, source.colors, source.sizes]
        self._stamp = json.dumps(["scenes", scenes, self._counts, *kinds])

    def open(self, name: str) -> Split:
        scenes = self._source.split(name)
        documents = [SceneDocument(scenes, number, self._scenes) for number in range(self._counts[name])]
        return ListSplit(documents, partial(self._record, name))

    def _record(self, name: str, document: "SceneDocument", epoch: int) -> Record:
        return Record(f"{name}-{document.number:06d}", {"document": document}, read_stamp=lambda: self._stamp)


@dataclass(frozen=True)
class SceneDocument:
    """A few scenes described in sentences, one line each.

    Args:
        split: The scenes.
        number: Index of the document in the split.
        scenes: Number of scenes.
    """

    split: Split
    number: int
    scenes: int

    def lines(self) -> Iterator[str]:
        for at in range(self.scenes):
            captions = self.split.record(self.number * self.scenes + at)["captions"]
            yield " ".join(f"{caption.capitalize()}." for caption in captions) + "\n"

    def size(self) -> int:
        return 0
