"""What cannot be resumed exactly is refused, and says why."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml
from fork_server import ForkServer
from journey import only_run
from small import command

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.file import write


@pytest.fixture(scope="module")
def finished(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs of a training that went to its end."""
    cwd = tmp_path_factory.mktemp("finished")
    ended = forks.run(command("captioning", "trainer.max_epochs=1"), cwd=cwd)
    assert ended.status == 0, ended.output
    return cwd


@pytest.fixture
def cwd(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, stopped before its end: it was to have two epochs."""
    shutil.copytree(finished, tmp_path / "cwd")
    change_config(only_run(tmp_path / "cwd" / "runs"), lambda config: config["trainer"].update(max_epochs=2))
    return tmp_path / "cwd"


def change_config(folder: Path, change) -> None:
    for path in folder.glob("checkpoints/*.ckpt"):
        loaded = ckpt.read(path)
        change(loaded["vlm"]["config"])
        write(path, loaded)


def read_refusal(forks: ForkServer, cwd: Path, *args: str) -> str:
    """What is said when a command is refused, having changed nothing."""
    before = listing(cwd)
    ended = forks.run(args, cwd=cwd)
    assert ended.status == 2, ended.output
    assert "Traceback" not in ended.output
    assert listing(cwd) == before
    return ended.output


def listing(cwd: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in cwd.glob("runs/*/20*/**/*")}


@pytest.mark.slow
def test_data_that_are_not_as_they_were_are_refused(forks, cwd) -> None:
    change_config(only_run(cwd / "runs"), lambda config: config["data"]["source"].update(seed=9))
    path = only_run(cwd / "runs") / "config.yaml"
    own = yaml.safe_load(path.read_text())
    own["data"]["source"]["seed"] = 9
    path.write_text(yaml.safe_dump(own))
    said = read_refusal(forks, cwd, "resume=last")
    assert "fingerprint" in said


@pytest.mark.slow
def test_a_checkpoint_in_the_folder_of_another_run_is_refused_naming_both(forks, cwd) -> None:
    path = only_run(cwd / "runs") / "config.yaml"
    path.write_text(path.read_text().replace("seed: 3\n", "seed: 5\n", 1))
    said = read_refusal(forks, cwd, "resume=last")
    assert "another run" in said and "seed=5" in said and "seed=3" in said


@pytest.mark.slow
def test_a_checkpoint_that_lies_elsewhere_is_refused(forks, cwd) -> None:
    shutil.copy(only_run(cwd / "runs") / "checkpoints" / "last.ckpt", cwd / "moved.ckpt")
    assert "config.yaml" in read_refusal(forks, cwd, "resume=moved.ckpt")


@pytest.mark.slow
def test_a_run_that_still_goes_on_cannot_be_resumed(forks, tmp_path) -> None:
    pid = forks.start(command("language_modeling", "trainer.max_epochs=400", "data.num_workers=1"), cwd=tmp_path)
    while not list(tmp_path.glob("runs/*/*/checkpoints/best.ckpt")):
        assert forks.wait(pid) is None
        time.sleep(0.05)
    ended = forks.run(["resume=last"], cwd=tmp_path)
    assert ended.status == 2 and "another process" in ended.output, ended.output
    os.kill(pid, signal.SIGKILL)
    assert forks.wait(pid, 10)
    assert "at least 1" in read_refusal(forks, tmp_path, "resume=last", "trainer.max_epochs=0")
    done = ckpt.read(only_run(tmp_path / "runs") / "checkpoints" / "last.ckpt")["epoch"]
    ended = forks.run(["resume=last", f"trainer.max_epochs={done + 2}"], cwd=tmp_path)
    assert ended.status == 0, ended.output
    assert "less than" in read_refusal(forks, tmp_path, "resume=last", f"trainer.max_epochs={done + 1}")


@pytest.mark.slow
def test_a_run_that_was_moved_goes_on_where_it_is_now(forks, finished, tmp_path) -> None:
    shutil.copytree(only_run(finished / "runs"), tmp_path / "elsewhere" / "run")
    ended = forks.run(["resume=elsewhere/run", "trainer.max_epochs=2"], cwd=tmp_path)
    assert ended.status == 0, ended.output
    assert not list((tmp_path / "runs").glob("*/20*"))
    scores = json.loads((tmp_path / "elsewhere" / "run" / "evaluation" / "test" / "metrics.json").read_text())
    assert "test/loss" in scores
