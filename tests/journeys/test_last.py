"""`last` and a run's folder, wherever a checkpoint is asked for."""

import os
import shutil
from pathlib import Path

import pytest
from tiny_checkpoints import EXACT, FILES, IMAGES

import vlm as vlm_api
from vlm.cli.main import run as vlm

USES = {
    "captioning caption": ["caption", *IMAGES, "--max-tokens", "12", *EXACT],
    "captioning predict": ["predict", *IMAGES, *EXACT],
    "captioning info": ["info"],
    "contrastive retrieve": ["retrieve", *IMAGES, "--text", "a red circle", *EXACT],
    "classification evaluate": ["evaluate", "--device", "cpu"],
}


def place(task: str, time: str, age: int) -> Path:
    """A run's folder with the tiny checkpoint of a task, so many seconds old."""
    path = Path("runs") / task / time / "checkpoints" / "best.ckpt"
    path.parent.mkdir(parents=True)
    shutil.copy(FILES / f"{task}.ckpt", path)
    os.utime(path, (10**9 - age, 10**9 - age))
    return path.parent.parent


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("use", USES)
def test_every_command_takes_the_newest_run_and_a_runs_folder(use, capsys) -> None:
    task = use.split()[0]
    place("tagging", "2", age=9)  # by name the later one
    run = place(task, "1", age=0)
    printed = []
    for checkpoint in (FILES / f"{task}.ckpt", run, "last"):
        assert vlm([*USES[use], "-c", str(checkpoint)]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2] != ""


def test_export_compare_python_and_training_take_them_too(capsys) -> None:
    run = place("captioning", "1", age=0)
    assert vlm(["export", "exported", "-c", "last", "--to", "safetensors"]) == 0
    (run / "evaluation" / "test").mkdir(parents=True)
    (run / "evaluation" / "test" / "metrics.json").write_text('{"test/cider": 0.5}')
    assert vlm(["compare", "last", str(run)]) == 0
    assert "0.5000" in capsys.readouterr().out
    assert vlm_api.load("last", device="cpu").task == "captioning"
    for checkpoint in ("last", str(run)):  # it is found, and has no adapters to merge
        assert vlm(["import", checkpoint, "--out", "one.ckpt"]) == 2
        assert f"{run / 'checkpoints' / 'best.ckpt'}: has no adapters to merge" in capsys.readouterr().err


@pytest.mark.parametrize("checkpoint", ["last", "runs/captioning/1"])
def test_no_output_replaces_the_checkpoint_of_a_run(checkpoint, capsys) -> None:
    file = place("captioning", "1", age=0) / "checkpoints" / "best.ckpt"
    before = file.read_bytes()
    assert vlm(["caption", *IMAGES, "-c", checkpoint, "--out", str(file)]) == 2
    assert "is also read" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_without_a_run_it_is_a_line(capsys) -> None:
    for command in (["caption", *IMAGES], ["info"], ["evaluate"]):
        assert vlm([*command, "-c", "last"]) == 2
        assert "error: last: there is no run with a checkpoint under runs/; name" in capsys.readouterr().err
    assert vlm(["compare", "last", "last"]) == 2
