"""A disk that is full, or cannot be written, ends a run in a line that says so; what was saved stays."""

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from journey import only_run
from small import command
from training_faults import on_step

from vlm.checkpoint import load as ckpt
from vlm.training.callbacks.progress import Samples
from vlm.training.run.fit import main

pytestmark = pytest.mark.slow

SMALL = command("classification", "trainer.max_epochs=2")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of a few megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(2**12)):
                pass
        except OSError:
            return


def check_stopped(error: str, path: Path, reason: str) -> None:
    """Asserts what a user is told."""
    assert f"{path}: " in error and reason in error, error
    assert "runs=DIR" in error or "another folder" in error
    assert "Traceback" not in error
    assert f"resume with: python train.py resume={path.parent.parent}" in error


def check_left(folder: Path, step: int) -> None:
    """Asserts that the last checkpoint is whole and of a step, and that no half file lies about."""
    assert ckpt.read(folder / "checkpoints" / "last.ckpt")["global_step"] == step
    assert not list(folder.rglob("*.tmp"))


def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_goes_on(disk: Path, monkeypatch, capsys) -> None:
    with monkeypatch.context() as patch:
        on_step(5, lambda: fill(disk), patch)
        assert main([*SMALL, f"runs={disk}"]) == 1
    folder, error = only_run(disk), capsys.readouterr().err
    check_stopped(error, folder / "checkpoints" / "last.ckpt", "No space left on device")
    assert error.count("warning: logger.csv fails") <= 1
    check_left(folder, 4)
    (disk / "filler").unlink()
    assert main([f"resume={folder}"]) == 0
    assert (folder / "evaluation" / "test" / "metrics.json").is_file()


def test_samples_on_a_full_disk(disk: Path, monkeypatch, capsys) -> None:
    samples = Samples.on_validation_end

    def late(self, trainer, pl_module):
        fill(disk)
        samples(self, trainer, pl_module)

    monkeypatch.setattr(Samples, "on_validation_end", late)
    assert main([*SMALL, f"runs={disk}"]) == 1
    folder = only_run(disk)
    check_stopped(capsys.readouterr().err, folder / "samples" / "step_8.jsonl", "No space left on device")
    check_left(folder, 8)  # saved before the validation


def test_results_on_a_full_disk(disk: Path, monkeypatch, capsys) -> None:
    from vlm.training.run import run

    write = run.save_results

    def late(*args, **options):
        fill(disk)
        write(*args, **options)

    monkeypatch.setattr(run, "save_results", late)
    assert main([*SMALL, f"runs={disk}", "trainer.max_epochs=1"]) == 1
    folder = only_run(disk)
    error = capsys.readouterr().err
    assert f"{folder / 'evaluation' / 'test'}" in error and "No space left on device" in error
    assert f"resume={folder}" in error and "Traceback" not in error
    assert not list((folder / "evaluation").rglob("*.json"))
    ckpt.read(folder / "checkpoints" / "last.ckpt")


def test_a_disk_that_turns_read_only(disk: Path, monkeypatch, capsys) -> None:
    def turn(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True)

    try:
        with monkeypatch.context() as patch:
            on_step(3, lambda: turn("ro"), patch)
            # The lock on the run keeps its config open, which a remount refuses.
            patch.setattr("vlm.training.run.run_folder.lock_run", lambda folder: None)
            assert main([*SMALL, f"runs={disk}"]) == 1
        folder = only_run(disk)
        check_stopped(capsys.readouterr().err, folder / "checkpoints" / "last.ckpt", "Read-only file system")
        assert ckpt.read(folder / "checkpoints" / "last.ckpt")["global_step"] == 2
    finally:
        turn("rw")


def test_files_that_may_not_grow(tmp_path: Path, monkeypatch, capsys) -> None:
    """The same where no file system can be mounted: the system refuses to make any file larger than a limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with monkeypatch.context() as patch:
            on_step(5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1])), patch)
            assert main([*SMALL, f"runs={tmp_path}"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder = only_run(tmp_path)
    check_stopped(capsys.readouterr().err, folder / "checkpoints" / "last.ckpt", "File too large")
    check_left(folder, 4)


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys) -> None:
    (tmp_path / "runs").write_text("a file")
    assert main([*SMALL, f"runs={tmp_path / 'runs'}"]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "runs") in error and "runs=DIR" in error and len(error.splitlines()) <= 2


def test_a_folder_without_permission(tmp_path: Path, capsys) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    assert main([*SMALL, f"runs={tmp_path}"]) == 1
    assert "Permission denied" in capsys.readouterr().err
