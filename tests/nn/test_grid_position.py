"""Positions of cells that are written row by row: a vector for each, and rotations by rows and columns."""

import pytest
import torch

from vlm.nn.grid_position import WrittenGridPositions
from vlm.nn.position import sincos_2d


def positions() -> WrittenGridPositions:
    return WrittenGridPositions(dim=16, head_dim=8, image_size=(16, 24), patch_size=4)


def test_each_cell_has_a_vector_that_begins_as_sines_and_cosines() -> None:
    made = positions()
    assert made.grid == (4, 6) and made.max_positions == 24
    vectors = made.embed(torch.arange(24))
    assert vectors is not None and torch.allclose(vectors, 0.5 * sincos_2d(4, 6, 16))


def test_products_of_queries_and_keys_depend_on_distances_by_rows_and_by_columns() -> None:
    made = positions()
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    cells = torch.arange(24)
    info = made.place(cells, keys=24)
    rotated = [info.rotate(x.expand(1, 1, 24, 8))[0, 0] for x in (query, key)]
    products = rotated[0] @ rotated[1].T  # of each query's cell with each key's
    by_distance: dict[tuple[int, int], list[float]] = {}
    for first in range(24):
        for second in range(24):
            distance = first // 6 - second // 6, first % 6 - second % 6
            by_distance.setdefault(distance, []).append(products[first, second].item())
    means = []
    for values in by_distance.values():
        assert max(values) - min(values) < 1e-5
        means.append(values[0])
    assert len({round(mean, 4) for mean in means}) == len(means) == 7 * 11  # no two distances look the same


def test_rows_with_positions_of_their_own_are_rotated_alike() -> None:
    made, places = positions(), torch.tensor([[3, 4], [10, 11]])
    together = made.place(places, keys=2).rotation
    assert together is not None
    for row, cells in enumerate(places):
        alone = made.place(cells, keys=2).rotation
        assert alone is not None
        assert all(torch.equal(one[row, 0], other) for one, other in zip(together, alone, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 6}, "head_dim 6 is not a multiple of 4"),
        ({"patch_size": 5}, "patch_size 5 does not divide the sides of images of 16 x 24 pixels"),
        ({"dim": 18}, "dim 18 is not a multiple of 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WrittenGridPositions(**{"dim": 16, "head_dim": 8, "image_size": (16, 24), "patch_size": 4, **options})  # type: ignore[arg-type]
