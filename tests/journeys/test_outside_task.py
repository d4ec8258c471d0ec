"""A task of a user's own package: source, field, model, loss terms, metric, report and predictor; vlm is not edited."""

from pathlib import Path

import pytest
import thermometer
import torch
from journey import best, only_run, results

from vlm.checkpoint.load import read
from vlm.cli.main import run as vlm
from vlm.config import target
from vlm.training.run.fit import main

CONF = Path(thermometer.__file__).parent / "conf"
GIVEN = ["trust=thermometer", "--config-dir", str(CONF), "task=thermometer", "trainer=cpu", "callbacks.progress=null"]
GIVEN += ["trainer.max_epochs=4", "trainer.precision=32-true", "optim.lr=0.05"]
GIVEN += ["schedule=constant", "schedule.warmup=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    assert main([*GIVEN, f"runs={runs}"]) == 0
    return only_run(runs)


@pytest.mark.slow
def test_it_trains_and_reports(trained) -> None:
    metrics = results(trained / "evaluation" / "test")
    assert {"test/loss", "test/loss_temperature", "test/loss_alarm", "test/error"} <= metrics.keys()
    weighted = metrics["test/loss_temperature"] + 0.3 * metrics["test/loss_alarm"]
    assert metrics["test/loss"] == pytest.approx(weighted, rel=1e-5) and metrics["test/error"] < 2
    page = (trained / "evaluation" / "test" / "report.html").read_text()
    assert "Thermometer" in page and "off by" in page


@pytest.mark.slow
def test_a_stopped_run_goes_on_exactly(trained, tmp_path) -> None:
    assert main([*GIVEN, f"runs={tmp_path}", "trainer.max_epochs=2"]) == 0
    folder = only_run(tmp_path)
    assert main([f"resume={folder}", "trust=thermometer", "trainer.max_epochs=4"]) == 0
    states = [read(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (folder, trained)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
def test_it_is_evaluated_as_the_runs_own_test(trained, tmp_path) -> None:
    assert vlm(["evaluate", "-c", best(trained), "--trust", "thermometer", "--out", str(tmp_path)]) == 0
    assert results(tmp_path) == results(trained / "evaluation" / "test")


def test_it_is_used(trained, capsys) -> None:
    checkpoint = best(trained)
    assert vlm(["predict", "1,0,0,1", "-c", checkpoint, "--trust", "thermometer", "--precision", "fp32"]) == 0
    name, value = capsys.readouterr().out.strip().split("\t")
    assert name == "1,0,0,1" and value.endswith(" C") and float(value.split()[0]) == pytest.approx(3, abs=1)
    assert vlm(["info", "-c", checkpoint]) == 0
    assert "thermometer.task.Thermometer" in capsys.readouterr().out


def test_it_is_not_used_without_trust(trained, monkeypatch, capsys) -> None:
    """Even where the package can be imported."""
    monkeypatch.setattr(target, "_allowed", [*target.PACKAGES])  # as in a fresh process
    for command in (["predict", "1,0,0,1"], ["evaluate"]):
        assert vlm([*command, "-c", best(trained)]) == 2
        said = capsys.readouterr()
        assert "--trust" in said.err and said.err.count("error: ") == 1 and not said.out
