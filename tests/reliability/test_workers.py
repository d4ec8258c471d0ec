"""A process that reads data is killed: the run ends, says so, and leaves nothing behind."""

import multiprocessing
import time
from pathlib import Path

import pytest
from faulty import strike
from journey import only_run
from small import command

from vlm.checkpoint import load as ckpt
from vlm.errors import UserError
from vlm.training.faults import _reworded
from vlm.training.fit import main
from vlm.training.task import Task

SMALL = command("classification", "trainer.max_epochs=2", "data.num_workers=2")


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_soon(tmp_path: Path, monkeypatch, capsys) -> None:
    start = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(Task, "training_step", Task.training_step)  # to be put back
        strike("kill worker", step=5)
        assert main([*SMALL, f"runs={tmp_path}"]) == 1
    assert time.monotonic() - start < 60
    error, folder = capsys.readouterr().err, only_run(tmp_path)
    assert "a process that reads data" in error and "was killed" in error and "data.num_workers" in error
    assert f"resume={folder}" in error and "Traceback" not in error
    assert ckpt.read(folder / "checkpoints" / "last.ckpt")["global_step"] == 4
    until = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < until:
        time.sleep(0.1)
    assert not multiprocessing.active_children()
    assert main([f"resume={folder}"]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "(pid 7) was killed (Killed)"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "(pid 7, 8) ended unexpectedly"),
        (
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are "
            "out of shared memory. Please try to raise your shared memory limit.",
            "shared memory",
        ),
    ],
)
def test_what_torch_says_of_workers_is_understood(text: str, said: str) -> None:
    found = _reworded(RuntimeError(text), {})
    assert isinstance(found, UserError) and said in str(found) and found.status == 1


def test_what_a_worker_raises_for_the_user_stays_a_line() -> None:
    text = "Caught UserError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File ...\n"
    found = _reworded(UserError(f"{text}vlm.errors.UserError: a.png: is damaged; mend it\n"), {})
    assert str(found) == "a.png: is damaged; mend it"
