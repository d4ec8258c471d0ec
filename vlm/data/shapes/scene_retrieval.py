"""Scenes with distinct objects, for retrieval."""

from vlm.data.records import Part, Split
from vlm.data.shapes.drawn import DrawnSplit
from vlm.data.shapes.scene_captions import Shapes
from vlm.data.shapes.scenes import Kind
from vlm.errors import UserError

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
        return split if split.fresh else Part(split, self._distinct(split))

    def _distinct(self, split: DrawnSplit) -> list[int]:
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
