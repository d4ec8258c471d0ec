"""Pairs of samples, by counting."""

import pytest

from vlm.data.pairs import BLOCK, block_of, partner


@pytest.mark.parametrize("size", [1, 2, 3, 7, BLOCK - 1, BLOCK, BLOCK + 1, 1000, 3 * BLOCK + 5])
def test_each_sample_has_another_of_its_block_and_is_that_of_one(size):
    blocks = [block_of(index, size) for index in range(size)]
    assert all(index in block for index, block in enumerate(blocks))
    assert sorted(index for block in {*blocks} for index in block) == [*range(size)]
    assert max(map(len, blocks)) <= BLOCK and max(map(len, blocks)) - min(map(len, blocks)) <= 1
    others = [partner(index, size) for index in range(size)]
    assert sorted(others) == [*range(size)]
    assert all(other in block for other, block in zip(others, blocks, strict=True))
    assert size == 1 or all(other != index for index, other in enumerate(others))
