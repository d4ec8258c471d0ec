"""Two processes train as one does."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from journey import only_run

from vlm.training.run.fit import main

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(small: list[str], tmp_path: Path) -> None:
    options = [*small, "trainer.max_epochs=1", "trainer.accumulate_grad_batches=2", "data.batch_size=6"]
    assert main([*options, f"runs={tmp_path / 'one'}"]) == 0
    command = [sys.executable, str(ROOT / "train.py"), *options, f"runs={tmp_path / 'two'}", "trainer=ddp"]
    command += ["trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.devices=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    one, two = (table(only_run(tmp_path / name)) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for at, value in one.items():
        tolerance = 1e-5 if at[1].endswith("loss") else 1e-6
        assert float(two[at]) == pytest.approx(float(value), abs=tolerance), at


def table(folder: Path) -> dict[tuple[str, str], str]:
    """All values of metrics.csv by step and metric."""
    with (folder / "metrics.csv").open() as file:
        return {(row["step"], name): value for row in csv.DictReader(file) for name, value in row.items() if value}
