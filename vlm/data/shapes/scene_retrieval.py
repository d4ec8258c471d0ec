"""Scenes that captions tell apart, for retrieval."""

from vlm.data.records import Part, Split
from vlm.data.shapes.scene_captions import Shapes, ShapesSplit
from vlm.data.shapes.scenes import valid_captions
from vlm.errors import UserError

TRIES = 100  # scenes that are drawn for each that is wanted, before there is held to be none


class DistinctShapes(Shapes):
    """Scenes as Shapes draws them; in validation and test, no caption is true of two scenes.

    Scenes of the same objects, placed otherwise, are among them: words alone, in no order, do not tell these apart.

    Args:
        others: As in Shapes.
    Raises:
        UserError: As in Shapes.
    """

    name = "distinct shapes"

    def open(self, name: str) -> Split:  # type: ignore[override]
        split = super().open(name)
        return split if split.fresh else Part(split, distinct(split))


def distinct(split: ShapesSplit) -> list[int]:
    """Numbers of the first scenes that have no caption in common, as many as the split is to have.

    Raises:
        UserError: There are fewer.
    """
    taken: set[str] = set()
    found: list[int] = []
    for index in range(TRIES * len(split)):
        captions = valid_captions(split.scene(0, index))
        if taken.isdisjoint(captions):
            taken.update(captions)
            found.append(index)
        if len(found) == len(split):
            return found
    raise UserError(
        f"data.source.{split.name}_scenes: only {len(found)} of {len(split)} scenes have no caption in common; "
        "ask for fewer, or add to data.source.shapes, data.source.colors or data.source.sizes"
    )
