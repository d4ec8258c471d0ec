"""Sizes of images, and grids of their patches."""

import pytest

from vlm.nn.image_size import fit_longest_side, grid_of, plain, sides


def test_a_number_is_a_square_and_two_are_height_and_width():
    assert sides(64) == (64, 64) and sides([64, 512]) == (64, 512)
    assert plain((64, 64)) == 64 and plain((64, 512)) == [64, 512]
    assert fit_longest_side((64, 512), 128) == (16, 128) and fit_longest_side(24, 128) == (128, 128)


def test_a_grid_is_that_of_the_patches():
    for rows in range(1, 40):
        for columns in range(1, 40):
            assert grid_of(rows * columns, (14 * rows, 14 * columns)) == (rows, columns)
    for cells in range(200):  # of a square, only squares of cells
        assert grid_of(cells, 32) == next(((n, n) for n in range(1, 15) if n * n == cells), None)


@pytest.mark.parametrize(("cells", "size"), [(0, (8, 8)), (64, (4, 5)), (17, (16, 16)), (33, (64, 512))])
def test_what_no_grid_of_such_images_has_is_none(cells, size):
    assert grid_of(cells, size) is None
