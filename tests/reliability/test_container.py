"""A container of one core and 2 GB: training and captioning run in it, and threads and workers follow its quota."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = Path("/sys/fs/cgroup")
MEMORY = 2 << 30
# Version 2 has one folder a group, version 1 one a controller.
LIMITS = {"cpu": {"cpu.cfs_quota_us": "100000"}, "memory": {"memory.limit_in_bytes": str(MEMORY)}}
if (BASE / "cgroup.controllers").exists():
    LIMITS = {"": {"cpu.max": "100000 100000", "memory.max": str(MEMORY)}}

SHOW = """
from vlm.machine import tune
tune()
import torch
from vlm.data.workers import default_workers
from vlm.machine import memory_limit
print(torch.get_num_threads(), default_workers(), memory_limit())
"""


@pytest.fixture
def container() -> Iterator[list[Path]]:
    """The groups of a container; whoever starts a process in it writes its number into their cgroup.procs."""
    groups = [BASE / controller / f"vlm-test-{os.getpid()}" for controller in LIMITS]
    try:
        for group, limits in zip(groups, LIMITS.values(), strict=True):
            group.mkdir()
            for name, value in limits.items():
                (group / name).write_text(value)
    except OSError as fault:
        pytest.skip(f"no container can be made here: {fault}")
    else:
        yield groups
    finally:
        for group in groups:
            if group.is_dir():
                group.rmdir()


def run_within(groups: list[Path], *command: str, cwd: Path) -> subprocess.CompletedProcess:
    enter = " ".join(f"echo $$ > {group}/cgroup.procs &&" for group in groups)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(ROOT)
    program = ["sh", "-c", f'{enter} exec "$@"', "sh", sys.executable, *command]
    return subprocess.run(program, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_threads_and_workers_follow_the_quota(container, tmp_path) -> None:
    done = run_within(container, "-c", SHOW, cwd=tmp_path)
    assert done.stdout.split() == ["1", "1", str(MEMORY)], done.stderr


@pytest.mark.slow
def test_the_main_job_and_captions(container, tmp_path) -> None:
    few = ["trainer.max_steps=4", "trainer.max_epochs=-1", "data.source.val_scenes=16", "data.source.test_scenes=16"]
    done = run_within(container, str(ROOT / "train.py"), *few, f"runs={tmp_path}/runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (checkpoint,) = tmp_path.glob("runs/*/*/checkpoints/best.ckpt")
    sample = ROOT / "data" / "sample"
    done = run_within(container, "-m", "vlm", "caption", str(sample), "-c", str(checkpoint), cwd=tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(list(sample.glob("*.png"))), done.stderr
