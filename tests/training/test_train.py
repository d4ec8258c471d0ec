"""What a finished run says."""

import signal
from types import SimpleNamespace

import pytest

from vlm.training.callbacks.signals import Stopped
from vlm.training.train import chose, leave


@pytest.mark.parametrize(
    ("monitor", "split", "marked"),
    [("val/loss", "val", True), ("val/loss", "test", False), (None, "val", False)],
)
def test_scores_on_the_split_that_chose_the_checkpoint_are_marked(monitor, split, marked):
    said = chose({"callbacks": {"checkpoints": {"monitor": monitor}}}, {f"{split}/loss": 1.0})
    assert ("too good" in said) == marked


def test_without_checkpoints_nothing_was_chosen():
    assert chose({"callbacks": {"checkpoints": None}}, {"val/loss": 1.0}) == ""


def test_a_run_may_be_stopped_before_its_callbacks_are_set_up(tmp_path, capsys):
    run = SimpleNamespace(folder=tmp_path, trainer=SimpleNamespace(strategy=SimpleNamespace(launcher=None)))
    assert leave(run, Stopped(signal.SIGINT, saved=False)) == 130
    assert "resume" not in capsys.readouterr().out
