import pytest
import torch

from vlm.nn.position import LearnedPositions, positions_within


def brute_force(segments):
    positions = []
    for index, segment in enumerate(segments):
        begins = index == 0 or segments[index - 1] != segment
        positions.append(0 if begins or segment == 0 else positions[-1] + 1)
    return positions


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 1, 1, 2, 2, 3, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9]],
        [[0, 0, 0], [4, 4, 4]],  # no captions at all; one that fills the row
        [[0, 0, 1, 1, 0, 2, 2]],  # padding on the left and in the middle
        [[]],
    ],
)
def test_positions_restart_in_each_segment(rows):
    assert positions_within(torch.tensor(rows, dtype=torch.long)).tolist() == [brute_force(row) for row in rows]


def test_no_rows():
    assert positions_within(torch.empty(0, 0, dtype=torch.long)).shape == (0, 0)


def test_learned_positions_look_up_their_vector():
    layer = LearnedPositions(dim=4, max_len=6)
    positions = torch.tensor([[0, 5, 2]])
    assert torch.equal(layer.embed(positions), layer.weight[positions])
    with pytest.raises(IndexError):
        layer.embed(torch.tensor([[6]]))
