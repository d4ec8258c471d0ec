"""`last` and a run's folder, wherever a checkpoint is asked for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import EXACT, FILES, IMAGES

import vlm as vlm_api
from vlm.cli.main import run as vlm
from vlm.training.run.fit import main

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


@pytest.mark.sample(plain=2, slow=3)
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
    assert "is also an input" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_without_a_run_it_is_a_line(capsys) -> None:
    for command in (["caption", *IMAGES], ["info"], ["evaluate"]):
        assert vlm([*command, "-c", "last"]) == 2
        assert "error: last: there is no run with a checkpoint under runs/; name" in capsys.readouterr().err
    assert vlm(["compare", "last", "last"]) == 2


@pytest.mark.sample(plain=1, slow=2)
@pytest.mark.parametrize("use", ["captioning info", "captioning caption", "classification evaluate"])
def test_every_command_takes_the_newest_run_of_a_name(use, capsys) -> None:
    task = use.split()[0]
    place("tagging", "2", age=0)  # the newest run, of another name
    older, run = place(task, "1", age=9), place(task, "0", age=5)
    (older / "checkpoints" / "best.ckpt").write_bytes(b"another run")
    os.utime(older / "checkpoints" / "best.ckpt", (10**9 - 9, 10**9 - 9))
    printed = []
    for checkpoint in (str(run), f"runs/{task}", f"runs/{task}/", task):
        assert vlm([*USES[use], "-c", checkpoint]) == 0
        printed.append(capsys.readouterr().out)
    assert [*{*printed}] == printed[:1] and printed[0]
    assert vlm_api.load(task, device="cpu").task == task


def test_a_file_and_a_folder_come_before_the_name_of_runs(capsys) -> None:
    place("captioning", "1", age=0)
    Path("captioning").mkdir()
    assert vlm(["info", "-c", "captioning"]) == 0  # a folder without a checkpoint
    Path("captioning/config.json").write_text("{}")
    assert vlm(["info", "-c", "captioning"]) == 2
    assert "error: captioning: model_type None is not supported" in capsys.readouterr().err


@pytest.mark.sample(plain=1, slow=1)
@pytest.mark.parametrize("given", ["captionin", "runs/captionin", "captionning"])
def test_a_misspelt_name_is_answered_with_the_nearest_one(given, capsys) -> None:
    place("captioning", "1", age=0)
    assert vlm(["info", "-c", given]) == 2
    assert capsys.readouterr().err.endswith("; did you mean runs/captioning?\n")
    assert main([f"resume={given}"]) == 2
    assert capsys.readouterr().err.endswith("; did you mean runs/captioning?\n")


def test_a_run_is_resumed_by_its_name(capsys) -> None:
    """The tiny checkpoint has no optimiser state, which the message says of the run that was found."""
    run = place("captioning", "1", age=5)
    (run / "checkpoints" / "best.ckpt").rename(run / "checkpoints" / "last.ckpt")
    place("tagging", "2", age=0)
    said = []
    for given in ("captioning", "runs/captioning", str(run)):
        assert main([f"resume={given}"]) == 2
        said.append(capsys.readouterr().err.replace(f"resume={given}", ""))
    assert [*{*said}] == said[:1] and "last.ckpt has no optimiser state" in said[0]


@pytest.mark.sample(plain=1, slow=1)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["caption", "x.jpg", "-c", "nope.ckpt"], "nope.ckpt: no such checkpoint"),
        (["evaluate", "-c", "nope.ckpt", "--split", "test"], "nope.ckpt: no such checkpoint"),
    ],
)
def test_missing_checkpoints_are_reported_before_torch_is_imported(words, message, tmp_path):
    script = f"import sys\nfrom vlm.cli.main import run\nprint(run({words!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "2 False\n" and message in done.stderr


@pytest.mark.slow
def test_a_missing_run_is_reported_before_torch_is_imported(tmp_path):
    script = "import sys; from vlm.training.run.fit import main; print(main(['resume=nope']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "2 False\n" and "resume=nope: no such run or checkpoint" in done.stderr
