"""A process that reads data is killed: the run ends, says so, and leaves nothing behind."""

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from fork_server import ForkServer
from journey import only_run
from small import command
from training_faults import strike

from vlm.checkpoint import load as ckpt
from vlm.errors import UserError
from vlm.training.run.faults import _find_user_error
from vlm.training.run.fit import main
from vlm.training.step.task import Task

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
    assert "a data loader worker" in error and "was killed" in error and "data.num_workers" in error
    assert f"resume={folder}" in error and "Traceback" not in error
    assert ckpt.read(folder / "checkpoints" / "last.ckpt")["global_step"] == 4
    until = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < until:
        time.sleep(0.1)
    assert not multiprocessing.active_children()
    assert main([f"resume={folder}"]) == 0


STUCK = {"idle": "pass", "asleep": "time.sleep(1e6)", "stopped": "os.kill(os.getpid(), signal.SIGSTOP)"}
# The best checkpoint has no room (batches in shared memory have), and the training loader's first worker gets stuck at
# its fourth batch, which it reads ahead while the run validates: before, the run would wait for its earlier batches.
NO_ROOM = """
import os, resource, signal, time
from torch.utils.data import _utils, get_worker_info
from vlm.checkpoint import file as save
from vlm.training.step.task import Task
start = Task.on_evaluation_start
def announced(self):
    if not self.trainer.sanity_checking:
        open("validating", "w").close()
    start(self)
Task.on_evaluation_start = announced
write = save.write
def limited(path, *args, **options):
    if str(path).endswith("best.ckpt"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    write(path, *args, **options)
save.write = limited
fetcher, done = _utils.fetch._MapDatasetFetcher, []
fetch = fetcher.fetch
def counted(self, keys):
    done.append(1)
    if len(done) == 4 and get_worker_info().id == 0:
        while not os.path.exists("validating"):
            time.sleep(0.01)
        %s
    return fetch(self, keys)
fetcher.fetch = counted
"""


@pytest.mark.slow
def test_a_save_that_fails_after_a_validation_ends_the_run_and_its_workers(forks: ForkServer, tmp_path: Path) -> None:
    once = ["trainer.val_check_interval=4", "callbacks.checkpoints.every_n_steps=100"]
    pids = {}
    for worker, stuck in STUCK.items():
        (tmp_path / worker).mkdir()
        pids[worker] = forks.start([*SMALL, *once], cwd=tmp_path / worker, patch=NO_ROOM % stuck)
    try:
        for worker, pid in pids.items():
            ended = forks.wait(pid, timeout=200)  # most of it for a busy machine to train
            assert ended is not None, f"{worker}: it hangs"
            assert ended.status == 1 and "best.ckpt: cannot write the checkpoint (File too large)" in ended.output
            assert "Traceback" not in ended.output, worker
            with pytest.raises(ProcessLookupError):  # nobody is left of its group
                os.killpg(pid, 0)
    finally:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


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
    found = _find_user_error(RuntimeError(text), {})
    assert isinstance(found, UserError) and said in str(found) and found.status == 1


def test_what_a_worker_raises_for_the_user_stays_a_line() -> None:
    text = "Caught UserError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File ...\n"
    found = _find_user_error(UserError(f"{text}vlm.errors.UserError: a.png: is damaged; mend it\n"), {})
    assert str(found) == "a.png: is damaged; mend it"
