"""Short texts about scenes of coloured shapes: a generated corpus."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from vlm.data.records import NAMES, Listed, Record, Source, Split
from vlm.data.shapes.scene_captions import Shapes
from vlm.data.shapes.scene_source import KindOptions
from vlm.errors import Count


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
        self._source = own = Shapes(
            train_scenes=train_documents * scenes,
            val_scenes=val_documents * scenes,
            test_scenes=test_documents * scenes,
            captions_per_image=2,
            **options,
        )
        self._scenes = scenes
        self._counts = {"train": train_documents, "val": val_documents, "test": test_documents}
        self._stamp = json.dumps(
            ["scenes", scenes, self._counts, own.seed, own.max_objects, own.shapes, own.colors, own.sizes]
        )

    def open(self, name: str) -> Split:
        scenes = self._source.split(name)
        documents = [SceneDocument(scenes, number, self._scenes) for number in range(self._counts[name])]
        return Listed(documents, partial(self._record, name))

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
