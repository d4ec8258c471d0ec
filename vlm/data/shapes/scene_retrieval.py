"""Scenes that their objects tell apart, for retrieval."""

from vlm.data.shapes.drawn import DrawnSplit, Keys
from vlm.data.shapes.scene_captions import Shapes
from vlm.data.shapes.scenes import Kind
from vlm.errors import UserError

TRIES = 100  # scenes that are drawn for each that is wanted, before there is held to be none


class DistinctShapes(Shapes):
    """Scenes as Shapes draws them; in validation and test, no two hold the same objects.

    Args:
        others: As in Shapes.
    Raises:
        UserError: As in Shapes.
    """

    name = "distinct shapes"

    def open(self, name: str) -> DrawnSplit:
        return DrawnSplit(self, name) if name == "train" else DistinctSplit(self, name)


class DistinctSplit(DrawnSplit):
    """The first scenes of a split each of which holds objects that no earlier one holds.

    Raises:
        UserError: They are fewer than the split is to have.
    """

    def __init__(self, source: DistinctShapes, name: str) -> None:
        super().__init__(source, name)
        wanted = len(self)
        places: dict[frozenset[Kind], int] = {}
        for place in range(TRIES * wanted):
            scene = source.scene(super().keys(place))
            places.setdefault(frozenset(kind for kind, _, _ in scene.objects), place)
            if len(places) == wanted:
                break
        else:
            raise UserError(
                f"data.source.{name}_scenes: only {len(places)} of {wanted} scenes hold objects of their own; "
                "ask for fewer, or add to data.source.shapes, data.source.colors or data.source.sizes"
            )
        self._places = list(places.values())

    def keys(self, index: int, epoch: int = 0) -> Keys:
        return super().keys(self._places[index], epoch)
