"""Folders of new runs, and output that nobody reads."""

import errno
import os
from pathlib import Path

import pytest
from journey import only_run
from small import command

from vlm.checkpoint.locate import run_folders
from vlm.cli.main import run as vlm
from vlm.errors import UserError
from vlm.tasks.shared.comparison import read
from vlm.training.run import run_folder
from vlm.training.run.fit import main

LONG = "n" * 300


def config(runs: Path, name: str = "mine") -> dict[str, str]:
    return {"runs": str(runs), "name": name}


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path):
    made = [run_folder.create_run_folder(config(tmp_path)) for _ in range(3)]
    assert len({*made}) == 3
    run_folder.write_run_config(made[1], config(tmp_path))
    run_folder.release_runs()
    assert list(tmp_path.glob("*/*")) == [made[1]], "the folder of a run that did not begin is removed"


@pytest.mark.parametrize("name", [LONG, "dangling"])
def test_a_folder_that_cannot_be_created_is_a_line(tmp_path, name):
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"cannot be created .*name=NAME"):
        run_folder.create_run_folder(config(tmp_path, name))


def test_a_link_to_nothing_is_no_run(tmp_path):
    folder = tmp_path / "name" / "time" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "last.ckpt").symlink_to(tmp_path / "nothing")
    assert run_folders(tmp_path) == []


@pytest.mark.parametrize("place", [LONG, "closed/run"])
def test_a_run_that_cannot_be_read_is_a_line(tmp_path, monkeypatch, capsys, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "closed").mkdir(mode=0)
    if os.geteuid() == 0 and place != LONG:
        pytest.skip("root may read anywhere")
    assert main([f"resume={place}"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "cannot be read" in error


@pytest.mark.parametrize("command", [["info"], ["caption", "x.png"], ["evaluate"]])
@pytest.mark.parametrize("place", [LONG, "closed"])
def test_a_checkpoint_that_cannot_be_read_is_a_line(place, command, monkeypatch, capsys):
    def refuse_permission(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    if place == "closed":
        monkeypatch.setattr(Path, "is_dir", refuse_permission)  # root may read anywhere
    assert vlm([*command, "-c", place]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {place}: cannot be read (") and line.endswith("give the path of a .ckpt file")


def test_deeply_nested_results_are_a_line(tmp_path):
    (tmp_path / "metrics.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(UserError, match=r"metrics\.json: cannot be read"):
        read(tmp_path, "mine")


@pytest.mark.slow
def test_a_training_goes_on_when_nobody_reads_its_output(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert main([*command("language_modeling", "trainer.max_steps=2"), f"runs={tmp_path}"]) == 0
    assert (only_run(tmp_path) / "evaluation" / "test" / "metrics.json").is_file()
