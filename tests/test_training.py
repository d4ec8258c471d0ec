"""What a finished run says."""

import pytest

from vlm.training import chose


@pytest.mark.parametrize(
    ("monitor", "split", "marked"),
    [("val/loss", "val", True), ("val/loss", "test", False), (None, "val", False)],
)
def test_scores_on_the_split_that_chose_the_checkpoint_are_marked(monitor, split, marked):
    said = chose({"callbacks": {"checkpoints": {"monitor": monitor}}}, {f"{split}/loss": 1.0})
    assert ("too good" in said) == marked


def test_without_checkpoints_nothing_was_chosen():
    assert chose({"callbacks": {"checkpoints": None}}, {"val/loss": 1.0}) == ""
