"""Which checkpoints a run writes, and what they hold."""

import csv
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from journey import only_run
from small import command

from vlm.checkpoint import load as ckpt
from vlm.io.terminal import train_command
from vlm.training.run.fit import main

STEPS = 3  # fewer than an epoch has
SMALL = command("language_modeling", f"trainer.max_steps={STEPS}", "schedule=constant", "schedule.warmup=0")
EARLY = ["+callbacks.early._target_=lightning.pytorch.callbacks.EarlyStopping", "+callbacks.early.monitor=val/loss"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of few steps, and its output."""
    runs, output = tmp_path_factory.mktemp("runs"), StringIO()
    with redirect_stdout(output):
        assert main([*SMALL, *EARLY, f"runs={runs}"]) == 0  # saved at step 2, before the first score
    return only_run(runs), output.getvalue()


@pytest.fixture
def folder(ended: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of that run, to resume."""
    return Path(shutil.copytree(ended[0], tmp_path / "name" / "time"))


def train_rows(folder: Path) -> dict[str, str]:
    with (folder / "metrics.csv").open(newline="") as file:
        return {row["step"]: row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]}


@pytest.mark.slow
def test_the_last_of_all_steps_is_validated_and_the_closing_lines_name_a_file(ended) -> None:
    folder, output = ended
    best = folder / "checkpoints" / "best.ckpt"
    assert ckpt.read(best)["global_step"] == STEPS
    assert "the best checkpoint" in output and f"checkpoint  {best}" in output


@pytest.mark.slow
def test_without_a_validation_the_closing_lines_name_the_last_checkpoint(tmp_path, capsys) -> None:
    assert main([*SMALL, f"runs={tmp_path}", "trainer.limit_val_batches=0"]) == 0
    last, output = only_run(tmp_path) / "checkpoints" / "last.ckpt", capsys.readouterr().out
    assert last.is_file() and "the last checkpoint" in output and f"checkpoint  {last}" in output
    assert "best.ckpt" not in output


@pytest.mark.slow
def test_best_holds_the_averaged_weights_and_nothing_that_only_training_reads(ended) -> None:
    best, last = (ckpt.read(ended[0] / "checkpoints" / f"{name}.ckpt") for name in ("best", "last"))
    assert not best.keys() & {"optimizer_states", "lr_schedulers", "loops", "callbacks", "ema"}
    assert all(torch.equal(best["state_dict"][name], average) for name, average in last["ema"].items())
    assert not all(torch.equal(best["state_dict"][name], last["state_dict"][name]) for name in last["ema"])


def test_best_cannot_be_resumed(ended, capsys) -> None:
    folder = ended[0] / "checkpoints"
    assert main([f"resume={folder / 'best.ckpt'}"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and str(folder / "last.ckpt") in error


@pytest.mark.slow
def test_more_steps_are_those_of_a_run_that_had_them_at_once(folder, tmp_path) -> None:
    assert main([*SMALL, f"runs={tmp_path / 'runs'}", "trainer.max_steps=6"]) == 0
    assert main([f"resume={folder}", "trainer.max_steps=6"]) == 0
    assert train_rows(folder) == train_rows(only_run(tmp_path / "runs"))


@pytest.mark.slow
def test_another_metric_on_resume_chooses_anew(tmp_path, capsys) -> None:
    assert main([*SMALL, f"runs={tmp_path}", "callbacks.checkpoints.monitor=val/perplexity"]) == 0
    folder = only_run(tmp_path)
    worse = ["callbacks.checkpoints.monitor=val/loss", "callbacks.checkpoints.mode=max"]  # any is better than none
    assert main([f"resume={folder}", "trainer.max_steps=6", *worse]) == 0
    scores = ckpt.read(folder / "checkpoints" / "last.ckpt")["callbacks"]
    (state,) = (state for name, state in scores.items() if name.startswith("Checkpoints"))
    assert state["monitor"] == "val/loss" and ckpt.read(folder / "checkpoints" / "best.ckpt")["global_step"] > STEPS


@pytest.mark.slow
def test_what_a_run_changed_on_resume_keeps_it_from_nothing(folder, capsys) -> None:
    assert main([f"resume={folder}", "trainer.max_steps=4", "activation_checkpointing=true"]) == 0
    assert main([f"resume={folder}", "trainer.max_steps=5"]) == 0
    assert main([f"resume={folder}", "trainer.max_steps=2"]) == 2
    assert "trainer.max_steps: 2 is less than the 5 completed" in capsys.readouterr().err


@pytest.mark.slow
def test_an_evaluation_of_fewer_steps_does_not_pass_for_the_last(folder, capsys) -> None:
    page = folder / "evaluation" / "test" / "report.html"
    assert page.is_file()
    assert main([f"resume={folder}", "trainer.max_steps=5", "trainer.limit_test_batches=0"]) == 0
    assert not page.exists()  # as where a signal comes during the test
    assert main([f"resume={folder}", "trainer.limit_test_batches=1.0"]) == 0
    assert page.is_file() and "finished" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_monitor_that_is_not_logged_is_refused(tmp_path, capsys) -> None:
    assert main([*SMALL, f"runs={tmp_path}", "callbacks.checkpoints.monitor=val/los"]) == 2
    error = capsys.readouterr().err
    assert "callbacks.checkpoints.monitor" in error and "val/los " in error and "val/loss" in error
    assert "did you mean val/loss?" in error and "Traceback" not in error
    command = f"resume={only_run(tmp_path)} callbacks.checkpoints.monitor=val/loss"
    assert error.rstrip().endswith(f"resume with: {train_command(command.split()[0], command.split()[1])}")
    assert main(command.split()) == 0
