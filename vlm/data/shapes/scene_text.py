"""Short texts about scenes of coloured shapes: a corpus that needs no files."""

import json
from collections.abc import Iterable, Iterator, Sequence

from vlm.data.shapes.scene_captions import Shapes
from vlm.errors import Count, UserError


class SceneText:
    """Short texts about scenes of coloured shapes, the same in every run; no two splits share a combination of shapes.

    A document tells of a few scenes, a line each: what is true of the scene, in sentences.

    Args:
        seed, shapes, colors, sizes, max_objects: As in `vlm.data.shapes.scene_captions.Shapes`.
        scenes: How many scenes a document tells of.
        train_documents, val_documents, test_documents: How many documents each split has.
    Raises:
        UserError: As Shapes, or a number is too small.
    """

    splits: tuple[str, ...] = Shapes.splits
    skipped: Sequence[str] = ()

    def __init__(
        self,
        *,
        seed: int,
        shapes: list[str],
        colors: list[str],
        sizes: list[str],
        max_objects: Count,
        scenes: Count,
        train_documents: Count,
        val_documents: Count,
        test_documents: Count,
    ) -> None:
        counts = {"train": train_documents, "val": val_documents, "test": test_documents}
        for name, value in [("scenes", scenes), *((f"{split}_documents", count) for split, count in counts.items())]:
            if value < 1:
                raise UserError(f"data.source.{name}: {value} is too small; give at least 1")
        self._source = Shapes(
            seed=seed,
            shapes=shapes,
            colors=colors,
            sizes=sizes,
            max_objects=max_objects,
            train_scenes=train_documents * scenes,
            val_scenes=val_documents * scenes,
            test_scenes=test_documents * scenes,
            captions_per_image=2,
        )
        self._scenes, self._counts = scenes, counts
        self._signature = json.dumps(["scenes", scenes, counts, seed, max_objects, shapes, colors, sizes])

    def documents(self, split: str) -> Iterator[Iterable[str]]:
        samples = self._source.split(split)
        for number in range(self._counts[split]):
            told = (samples.captions(0, number * self._scenes + at) for at in range(self._scenes))
            yield [" ".join(f"{caption.capitalize()}." for caption in captions) + "\n" for captions in told]

    def size(self, split: str) -> int:
        return 0

    def signature(self) -> str:
        return self._signature
