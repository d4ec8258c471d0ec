"""A logger that fails costs a warning, never the run."""

import csv
import resource
from pathlib import Path

import pytest
from journey import only_run
from lightning.pytorch.loggers import TensorBoardLogger
from small import command
from training_faults import on_step

from vlm.training.run.fit import main

SMALL = command("language_modeling", "trainer.max_steps=6", "callbacks.ema=null", "logger=tensorboard")


@pytest.mark.sample(plain=1, slow=2)
@pytest.mark.parametrize("broken", ["log_metrics", "experiment", "log_hyperparams", "save", "finalize", "version"])
def test_a_logger_that_raises_is_warned_of_once(broken: str, tmp_path: Path, monkeypatch, capsys) -> None:
    def fail(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "events")

    monkeypatch.setattr(TensorBoardLogger, broken, property(fail) if broken in ("experiment", "version") else fail)
    assert main([*SMALL, f"runs={tmp_path}"]) == 0
    error = capsys.readouterr().err
    assert error.count("warning: ") == (broken != "log_hyperparams"), error
    assert "logger.tensorboard fails (events: Permission denied)" in error or broken == "log_hyperparams"
    assert len(list(csv.DictReader((only_run(tmp_path) / "metrics.csv").open()))) == 7


@pytest.mark.slow
def test_metrics_wait_until_there_is_room(tmp_path: Path, monkeypatch, capsys) -> None:
    """No file may grow for three steps, by the system's own limit: rows are kept, and written later."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        on_step(2, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1])), patch)
        on_step(5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits), patch)
        try:
            # Nothing but loggers writes in between.
            every = "callbacks.checkpoints.every_n_steps=100"
            assert main([*SMALL, f"runs={tmp_path}", every]) == 0
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert error.count("warning: logger.csv fails") == 1 and "File too large" in error
    assert "Traceback" not in error
    rows = list(csv.DictReader((only_run(tmp_path) / "metrics.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(7))
