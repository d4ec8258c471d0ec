"""Two processes that something else started: torchrun, or srun of SLURM."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compare import check_same, rows
from fork_server import ROOT, ForkServer
from journey import only_run
from small import command
from trainings import ddp, places_of

from vlm.checkpoint import load as ckpt

TWO = ddp(2)

# Writes down what a process opens for writing, renames or makes below the folder it is started in.
WATCH = """
import os, sys
def watch(event, args):
    if event == "open" and isinstance(args[0], (str, os.PathLike)) and isinstance(args[2], int):
        made = [args[0]] if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else []
    else:
        made = args[:1] if event in ("os.mkdir", "os.rename", "os.remove") else []
    for path in made:
        if os.path.abspath(path).startswith(os.getcwd() + os.sep) and not os.path.isdir(path):
            os.write(1, f"WROTE {path}\\n".encode())
sys.addaudithook(watch)
"""


def torchrun(*args: str, cwd: Path) -> subprocess.Popen:
    """Starts `torchrun --nproc-per-node 2 train.py` with these arguments, as README.md says."""
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = (cwd / "torchrun.log").open("a")
    return subprocess.Popen([*started, str(ROOT / "train.py"), *args], cwd=cwd, env=env, stdout=log, stderr=log)


@pytest.mark.nightly  # test_kills.py stops ranks that Lightning starts in a slow run
def test_a_run_under_torchrun_stops_on_sigterm_and_goes_on(forks: ForkServer, tmp_path: Path) -> None:
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    args = command("classification", "trainer.max_epochs=6", *TWO)
    whole = [forks.start(args, cwd=tmp_path / "whole", env=place) for place in places("torchrun")]
    assert [forks.wait(pid, 120).status for pid in whole] == [0, 0]
    process = torchrun(*args, cwd=tmp_path / "stopped")
    while not list((tmp_path / "stopped").glob("runs/*/*/checkpoints/last.ckpt")):
        assert process.poll() is None, (tmp_path / "stopped" / "torchrun.log").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0
    said = (tmp_path / "stopped" / "torchrun.log").read_text()
    assert "the run is saved" in said, said
    assert torchrun("resume=last", cwd=tmp_path / "stopped").wait(120) == 0
    check_same(*(only_run(tmp_path / name / "runs") for name in ("stopped", "whole")))


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("starter", ["srun", "torchrun"])
def test_all_ranks_share_a_folder_and_only_the_first_writes(starter, forks: ForkServer, tmp_path: Path) -> None:
    args = command("captioning", "trainer.max_epochs=1", *TWO)
    pids = []
    for place in places(starter):
        pids.append(forks.start(args, cwd=tmp_path, env=place, patch=WATCH))
        time.sleep(1.1)  # a folder named by each one's own clock would be another
    first, second = (forks.wait(pid, 120) for pid in pids)
    assert first and second and first.status == second.status == 0, (first, second)
    assert "WROTE" in first.output and "WROTE" not in second.output
    assert ckpt.read(only_run(tmp_path / "runs") / "checkpoints" / "last.ckpt")["global_step"] == 8


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("given", [[*TWO[:-1], "trainer.devices=1"], []])
def test_other_processes_than_the_trainer_reckons_with_are_refused(given, forks: ForkServer, tmp_path: Path) -> None:
    args = command("classification", "trainer.max_epochs=1", *given)
    pids = [forks.start(args, cwd=tmp_path, env=place) for place in places("torchrun")]
    for ended in [forks.wait(pid, 120) for pid in pids]:
        assert ended and ended.status == 2 and "trainer.devices" in ended.output and "Traceback" not in ended.output, (
            ended
        )
        assert not given or "2 processes were started, but the trainer expects 1" in ended.output
    assert not list(tmp_path.glob("runs/*/20*"))


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_requeues_and_the_same_command_goes_on(signum, forks: ForkServer, tmp_path: Path) -> None:
    for name in ("whole", "job", "bin"):
        (tmp_path / name).mkdir()
    args = command("language_modeling", "trainer.max_epochs=8")
    assert forks.run(args, cwd=tmp_path / "whole").status == 0
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    job = slurm(1, 0) | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    pid = forks.start(args, cwd=tmp_path / "job", env=job)
    runs = tmp_path / "job" / "runs"
    while not list(runs.glob("*/*/metrics.csv")) or len(rows(only_run(runs))) < 9:
        assert forks.wait(pid) is None
        time.sleep(0.01)
    os.kill(pid, signum)
    ended = forks.wait(pid, 120)
    assert ended and ended.status == 128 + signum and "the run is saved" in ended.output, ended
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").is_file() else ""
    # SLURM itself requeues what it has preempted, which it tells by SIGTERM.
    assert asked == ("requeue 4711\n" if signum == signal.SIGUSR1 else "")
    again = forks.run(args, cwd=tmp_path / "job", env={**job, "SLURM_RESTART_COUNT": "1"})
    assert again.status == 0 and "resuming" in again.output, again.output
    (only_run(runs) / "slurm_job").unlink()
    check_same(*(only_run(tmp_path / name / "runs") for name in ("job", "whole")))
    other = forks.start(args, cwd=tmp_path / "job", env={**job, "SLURM_JOB_ID": "4712", "SLURM_RESTART_COUNT": "1"})
    os.kill(other, signal.SIGKILL)
    assert forks.wait(other, 10)


def places(starter: str) -> list[dict[str, str]]:
    """The environment of each of two processes, as their starter gives it."""
    if starter == "torchrun":
        return places_of(2)
    port = places_of(2)[0]["MASTER_PORT"]
    return [slurm(2, rank) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for rank in range(2)]


def slurm(tasks: int, rank: int) -> dict[str, str]:
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(tasks)}
    job |= {"SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    return job | {"SLURM_NNODES": "1", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
