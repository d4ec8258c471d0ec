"""One of two processes dies: both end soon, with the error of the one at fault, and the run can go on."""

import os
import time
from pathlib import Path

import pytest
from fork_server import ForkServer, ProcessResult
from journey import only_run
from small import command
from training_faults import DDP, run_two

from vlm.checkpoint import load as ckpt

pytestmark = pytest.mark.slow

SMALL = [*command("language_modeling", "trainer.max_steps=200", "callbacks.ema=null"), *DDP]


def run_as_a_user(forks: ForkServer, kind: str, rank: int, cwd: Path, *more: str) -> ProcessResult:
    """Runs a training that starts its second process itself, with a fault on one of them."""
    patch = f"import sys, training_faults as faults; sys.argv[0] = faults.__file__; faults.strike({kind!r}, 5, {rank})"
    pid = forks.start([*SMALL, *more], cwd=cwd, env={"FAULT": f"{kind}:5:{rank}"}, patch=patch)
    until = time.monotonic() + 90  # the second process starts from nothing, on a busy machine
    while not list(cwd.glob("runs/*/*/checkpoints/last.ckpt")) and time.monotonic() < until and not forks.wait(pid):
        time.sleep(0.1)
    ended = forks.wait(pid, timeout=60)  # from the first save on, which is just before the fault
    assert ended is not None, "it hangs"
    return ended


def list_processes(folder: Path) -> list[str]:
    """Command lines of living processes that know this folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_text(errors="replace").replace("\0", " ")
            if os.readlink(place / "cwd").startswith(str(folder)) and "python" in line:
                found.append(line)
        except OSError:
            continue
    return found


def check_left_whole(folder: Path) -> None:
    """Asserts that the run of a folder can go on, and that none of its processes is left."""
    saved = ckpt.read(only_run(folder / "runs") / "checkpoints" / "last.ckpt")
    assert saved["global_step"] == 4
    until = time.monotonic() + 20  # a loader's worker looks every five seconds whether its owner lives
    while list_processes(folder) and time.monotonic() < until:
        time.sleep(0.2)
    assert not list_processes(folder)


RAISED = ["RuntimeError: the original fault"]


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize(
    ("kind", "rank", "status", "said"),
    [
        ("kill", 1, 1, ["error: rank 1 was killed by SIGKILL"]),
        ("raise", 0, 1, [*RAISED, "raised on rank 0 of 2"]),
        ("kill", 0, -9, []),
        ("raise", 1, 1, [*RAISED, "raised on rank 1 of 2", "error: rank 1 ended with an error (see above)"]),
    ],
)
def test_a_rank_dies(kind, rank, status, said, forks: ForkServer, tmp_path: Path) -> None:
    ended = run_as_a_user(forks, kind, rank, tmp_path, f"data.num_workers={int(kind == 'kill' and rank == 1)}")
    assert ended.status == status and all(part in ended.output for part in said), ended.output
    if kind == "raise":
        assert ended.output.count("Traceback") == 1 and "gloo" not in ended.output, ended.output
    elif rank == 1:
        go_on = f"resume=runs/language_modeling/{only_run(tmp_path / 'runs').name}"
        assert go_on in ended.output and "Traceback" not in ended.output, ended.output
    check_left_whole(tmp_path)


@pytest.mark.nightly  # a rank that raises is among the slow ones above, two started by hand are below
def test_ranks_that_torchrun_started(forks: ForkServer, tmp_path: Path) -> None:
    patch = "import training_faults; training_faults.strike('raise', 5, 1)"
    one, two = run_two(forks, SMALL, cwd=tmp_path, patch=patch)
    assert one.status == two.status == 1
    assert "RuntimeError: the original fault" in two.output and "raised on rank 1 of 2" in two.output
    assert "error: rank 0: another process of the run ended" in one.output and "Traceback" not in one.output
    check_left_whole(tmp_path)


def test_no_memory_on_one_rank(forks: ForkServer, tmp_path: Path) -> None:
    patch = "import training_faults; training_faults.strike('no memory', 5, 1)"
    one, two = run_two(forks, SMALL, cwd=tmp_path, patch=patch)
    assert one.status == two.status == 1
    assert "error: rank 1: out of memory" in two.output and "Traceback" not in one.output + two.output, two.output
    check_left_whole(tmp_path)
