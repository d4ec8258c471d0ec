"""What a training does on a GPU: the same as on a CPU, without waiting for the device.

Each test also runs once with the CPU in the GPU's place, so that it is known to work before there is a GPU.
"""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from journey import best, only_run, results
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from small import TASKS, command

from vlm.cli.main import run as vlm
from vlm.training.run.fit import main

ROOT = Path(__file__).parents[2]
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)]
EXACT = ["model.size.dropout=0", "trainer.precision=32-true", "trainer.max_epochs=-1", "trainer.max_steps=30"]
UNMIXED = {"classification": ["task.mixup=0", "task.cutmix=0"]}


def train_task(task: str, trainer: str, runs: Path, *more: str) -> Path:
    options = [*command(task), *EXACT, *UNMIXED.get(task, []), f"trainer={trainer}", f"runs={runs}", *more]
    assert main(options) == 0
    return only_run(runs)


def losses(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]


@pytest.mark.parametrize(
    ("task", "compiled", "device"),
    [
        pytest.param("tagging", "false", "cpu", marks=pytest.mark.slow),
        *(
            pytest.param(task, compiled, "gpu", marks=pytest.mark.gpu)
            for task in TASKS
            for compiled in ("false", "true")
        ),
    ],
)
def test_thirty_steps_are_those_of_a_cpu(task: str, compiled: str, device: str, tmp_path: Path) -> None:
    truth = losses(train_task(task, "cpu", tmp_path / "cpu"))
    found = losses(train_task(task, device, tmp_path / "other", f"compile={compiled}"))
    assert len(truth) == 30 and found == pytest.approx(truth, rel=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("task", TASKS)
def test_a_step_never_waits(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = _TrainingEpochLoop.advance

    def watch_step(loop: Any, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if 4 <= loop.global_step < 8 else "default")
        try:
            advance(loop, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(_TrainingEpochLoop, "advance", watch_step)
    rare = ["callbacks.checkpoints.every_n_steps=100", "trainer.log_every_n_steps=100", "trainer.limit_val_batches=0"]
    train_task(task, "gpu", tmp_path, *rare, "compile=false", "trainer.max_steps=9")


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_and_captions_are_those_of_a_cpu(device: str, tmp_path: Path, capsys: Any) -> None:
    checkpoint = best(train_task("captioning", "cpu", tmp_path / "runs"))
    scores, captions = [], []
    images = [str(path) for path in (ROOT / "data" / "sample").rglob("*.png")][:4]
    for name in ("cpu", {"gpu": "cuda"}.get(device, device)):
        out = tmp_path / f"out{len(scores)}"
        evaluate = ["evaluate", "-c", checkpoint, "--split", "val", "--device", name, "--out", str(out)]
        assert vlm(evaluate) == 0  # in the 32 bits of the run
        scores.append(results(out))
        capsys.readouterr()
        assert vlm(["caption", *images, "-c", checkpoint, "--device", name, "--precision", "fp32"]) == 0
        captions.append(capsys.readouterr().out)
    assert len(captions[0].splitlines()) == len(images) == 4 and captions[0] == captions[1]
    for name, value in scores[0].items():
        assert scores[1][name] == pytest.approx(value, rel=1e-3, abs=1e-3), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_run_goes_on(device: str, tmp_path: Path) -> None:
    options = ["compile=false", "schedule=constant", "schedule.warmup=0"]  # a schedule ends with the steps
    whole = losses(train_task("language_modeling", device, tmp_path / "whole", *options))
    folder = train_task("language_modeling", device, tmp_path / "parts", *options, "trainer.max_steps=16")
    assert main([f"resume={folder}", "trainer.max_steps=30"]) == 0
    assert losses(folder) == pytest.approx(whole, rel=1e-3)


@pytest.mark.gpu
def test_steps_are_recorded_beside_a_thread_that_pins_memory() -> None:
    """As the loader of a training does beside its validation."""
    script = ROOT / "benchmarks" / "gpu" / "recording.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("0 of 20 not recorded\nfault of the other thread: none\n"), done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_gpus_take_the_steps_of_one(strategy: str, forks: ForkServer, tmp_path: Path) -> None:
    one = losses(train_task("language_modeling", "gpu", tmp_path / "one", "compile=false"))
    options = [*command("language_modeling"), *EXACT, "compile=false", f"trainer={strategy}", "trainer.devices=2"]
    ended = forks.run(options, cwd=tmp_path)
    assert ended.status == 0, ended.output
    assert losses(only_run(tmp_path / "runs")) == pytest.approx(one, rel=1e-3)
