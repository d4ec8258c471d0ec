"""`vlm bench`: the figures of a real run, and nothing left behind."""

import csv
import json
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from journey import only_run

from vlm.cli import batch_size
from vlm.cli.batch_size import Trial, repeat_largest_batch, search_largest
from vlm.cli.main import run as vlm
from vlm.config.compose import compose
from vlm.training.run.build import build_data
from vlm.training.run.fit import main
from vlm.training.step.task import Task


@pytest.mark.slow
def test_it_prints_what_a_run_does_and_leaves_none(small, small_text, tmp_path, capsys) -> None:
    given = [*small, f"runs={tmp_path}", "trainer.max_epochs=1", "callbacks=ema", "callbacks.progress=null"]
    assert vlm(["bench", *given, "--steps", "8", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "cache" not in path.parts]
    assert found["steps"] == 8 and found["batch_size"] == 8 and found["model"] == "VisionLanguageModel"
    assert found["step_ms_p10"] <= found["step_ms"] <= found["step_ms_p90"]
    assert 0 < found["images_per_s"] < 8e3 / found["step_ms_p10"] * 1.01 and 0 <= found["data_wait"] < 1
    assert vlm(["bench", *small_text, f"runs={tmp_path}", "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "Decoder" in said and "tokens/s" in said and "images/s" not in said and "MFU" not in said


@pytest.mark.nightly  # two timings, which another test beside them disturbs
def test_its_figures_are_those_of_training(small_classes, tmp_path, capsys) -> None:
    """Of a step large enough that what surrounds it, and other work on the machine, weighs little."""
    given = [*small_classes, "model.size.dim=96", "model.size.encoder_depth=4", "data.batch_size=48"]
    given += [f"runs={tmp_path}", "trainer.max_epochs=6", "data.source.train_scenes=480"]
    assert main([*given, "trainer.log_every_n_steps=10"]) == 0
    with (only_run(tmp_path) / "throughput.csv").open() as file:
        rates = sorted(float(row["images_per_s"]) for row in csv.DictReader(file))
    capsys.readouterr()
    assert vlm(["bench", *given, "--steps", "20", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["images_per_s"]
    assert 0.6 * rates[len(rates) // 2] < found < 1.7 * rates[len(rates) // 2]


@pytest.mark.parametrize(
    ("given", "named"),
    [(["optim.lrr=1"], "optim.lrr"), (["--format", "csv"], "--format"), (["--find-batch", "trainer=ddp"], "devices")],
)
def test_what_is_wrong_is_named(given, named, capsys) -> None:
    assert vlm(["bench", *given]) == 2
    assert named in capsys.readouterr().err


def test_the_largest_batch_is_found() -> None:
    for start, most, limit in product([1, 7, 64, 5000], [1, 2, 31, 1000, 1001, 4096], [1, 900, 10**6]):
        tried: list[int] = []
        is_tried = lambda size, tried=tried, most=most: not tried.append(size) and size <= most  # noqa: E731
        found = search_largest(is_tried, start=start, limit=limit)
        expected = min(most, limit)
        assert expected - max(1, expected // 16) < found <= expected, (start, most, limit)
        assert all(size <= limit for size in tried) and len(tried) < 30, (start, most, limit)


def test_a_device_that_is_full_is_found_by_trying(monkeypatch) -> None:
    """A GPU of room for 37 images, played by a trial."""

    def measure_batch(config, size):
        return SimpleNamespace(size=size, fits=size <= 37, samples=48, device="cuda")

    monkeypatch.setattr(batch_size, "Trial", measure_batch)
    found = batch_size.find_largest_batch({"data": {"batch_size": 8}, "trainer": {"devices": 1}})
    assert found == {"largest_batch_size": 36, "estimate": False, "how": "measured, to within 1/16"}


@pytest.mark.slow
def test_a_trial_without_memory_does_not_fit(small, tmp_path, monkeypatch) -> None:
    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Task, "training_step", fail)
    assert not Trial(compose([*small, f"runs={tmp_path}"]), 2).fits


@pytest.mark.slow
def test_trials_take_the_heaviest_batch(small, tmp_path) -> None:
    data = build_data(compose([*small, f"runs={tmp_path}", "data.bucket=32"]))
    data.prepare()
    sizes = [batch["captions"].tokens.numel() for batch in data.train_dataloader()]
    found = [batch["captions"].tokens.numel() for batch in repeat_largest_batch(data.train_dataloader(), 3)]
    assert found == [max(sizes)] * 3 and min(sizes) < max(sizes)


# In a process of its own: memory that other tests left free would be filled first.
MEMORY = """
import contextlib, io, json, sys
from vlm.cli import batch_size
from vlm.cli.main import run
from vlm.config.compose import compose
batch_size.available_memory = lambda: 2**29
with contextlib.redirect_stdout(io.StringIO()) as printed:
    assert run(["bench", *sys.argv[1:], "--find-batch", "--format", "json"]) == 0
found, before = json.loads(printed.getvalue()), batch_size.read_kernel_size("/proc/self/status", "VmRSS")
peak = batch_size.Trial(compose(sys.argv[1:]), found["largest_batch_size"]).peak
print(json.dumps({**found, "grown": (peak - before) / (2**29 * batch_size.USABLE_SHARE)}))
"""


@pytest.mark.slow
def test_memory_on_a_cpu_is_estimated(small, tmp_path) -> None:
    """What a batch of the estimated size then takes is what was said to be free, to within a third."""
    given = [*small, f"runs={tmp_path}", "data.source.train_scenes=3000", "data.batch_size=256", "model.size.dim=96"]
    done = subprocess.run([sys.executable, "-c", MEMORY, *given], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["estimate"] and 256 < found["largest_batch_size"] < 3000
    assert 0.6 < found["grown"] < 1.4
