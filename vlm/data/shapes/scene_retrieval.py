"""Scenes that their objects tell apart, for retrieval."""

from vlm.data.records import Part, Split
from vlm.data.shapes.drawn import DrawnSplit
from vlm.data.shapes.scene_captions import Shapes
from vlm.data.shapes.scenes import Kind
from vlm.errors import UserError

TRIES = 100  # scenes that are drawn for each that is wanted, before there is held to be none


class DistinctShapes(Shapes):
    """Scenes as Shapes draws them; in validation and test, no two hold the same objects.

    Args:
        options: As in Shapes.
    Raises:
        UserError: As in Shapes.
    """

    name = "distinct shapes"

    def open(self, name: str) -> Split:  # type: ignore[override]
        split = super().open(name)
        return split if split.fresh else Part(split, self._distinct(split))

    def _distinct(self, split: DrawnSplit) -> list[int]:
        """Numbers of the first scenes that hold objects which no earlier one holds, as many as the split is to have.

        Raises:
            UserError: There are fewer.
        """
        chosen: dict[frozenset[Kind], int] = {}
        for index in range(TRIES * len(split)):
            chosen.setdefault(frozenset(kind for kind, _, _ in self.scene(split.keys(index)).objects), index)
            if len(chosen) == len(split):
                return list(chosen.values())
        raise UserError(
            f"data.source.{split.name}_scenes: only {len(chosen)} of {len(split)} scenes hold objects of their own; "
            "ask for fewer, or add to data.source.shapes, data.source.colors or data.source.sizes"
        )
