"""The figures of throughput in a run, against counts and clocks of the test's own."""

import csv
from types import SimpleNamespace

import pytest
from journey import only_run

from vlm.models.flop import Work, model_flop
from vlm.training import data_module as step_loader
from vlm.training.callbacks import speed as throughput
from vlm.training.data_module import StepLoader
from vlm.training.run.fit import main
from vlm.training.step.task import Task

pytestmark = pytest.mark.slow


def rows(runs):
    with (only_run(runs) / "throughput.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is told to: 2 s in a fetch, 6 s in a step."""
    found = SimpleNamespace(now=100.0, perf_counter=lambda: found.now, monotonic=lambda: found.now)

    def slower(own, seconds):
        def pass_time(*args, **kwargs):
            found.now += seconds
            return own(*args, **kwargs)

        return pass_time

    by_step = StepLoader._by_step

    def fetch_batches(loader, batches):
        for batch in by_step(loader, batches):
            found.now += 2.0
            yield batch

    monkeypatch.setattr(StepLoader, "_by_step", fetch_batches)
    for name, seconds in (("training_step", 6.0), ("on_validation_epoch_end", 1000.0)):
        monkeypatch.setattr(Task, name, slower(getattr(Task, name), seconds))
    for module in (throughput, step_loader):
        monkeypatch.setattr(module, "time", found)


def test_figures_are_those_of_what_was_read(small, clock, monkeypatch, tmp_path):
    """An epoch of 6 batches, and another, with a validation after each that takes a thousand seconds."""
    batches, flop = [], []
    read = Task.training_step

    def step(task, batch, batch_idx):
        if not flop:
            flop.append(model_flop(task.model, image_size=batch["images"].shape[-1]))
        batches.append(batch)
        return read(task, batch, batch_idx)

    monkeypatch.setattr(Task, "training_step", step)
    assert main([*small, f"runs={tmp_path}", "trainer.max_epochs=2", "trainer.log_every_n_steps=4"]) == 0
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [3, 7, 11] and len(batches) == 12
    for row, four in zip(found, [batches[:4], batches[4:8], batches[8:]], strict=True):
        assert row["images_per_s"] == sum(len(b.ids) for b in four) / 32  # of 2 + 6 s each
        texts = [b["captions"] for b in four]
        predicted = [sum((s == k).sum().item() - 1 for s in t.segments for k in set(s.tolist()) - {0}) for t in texts]
        assert row["tokens_per_s"] == pytest.approx(sum(predicted) / 32, rel=1e-4)
        assert row["data_wait"] == 0.25 and "mfu" not in row
        works = [Work(len(t.tokens), *t.tokens.shape) for t in texts]
        expected = sum(flop[0].training(work, n) for work, n in zip(works, predicted, strict=True))
        assert row["flop_per_s"] == pytest.approx(expected / 32, rel=1e-4)
        assert 0.05 < row["peak_memory_gib"] < 32


def test_a_model_of_no_known_kind_gets_all_else(small_text, monkeypatch, tmp_path):
    def fail(*args, **kwargs):
        raise TypeError("unknown")

    monkeypatch.setattr(throughput, "model_flop", fail)
    assert main([*small_text, f"runs={tmp_path}", "trainer.max_epochs=-1", "trainer.max_steps=3"]) == 0
    assert set(rows(tmp_path)[0]) == {"step", "tokens_per_s", "data_wait", "peak_memory_gib"}


def test_accumulated_batches_are_all_counted(small_classes, clock, tmp_path):
    options = ["trainer.accumulate_grad_batches=3", "data.source.train_scenes=48", "trainer.log_every_n_steps=2"]
    assert main([*small_classes, *options, f"runs={tmp_path}", "trainer.max_epochs=1"]) == 0
    (row,) = rows(tmp_path)
    assert row["images_per_s"] == 1.0 and "tokens_per_s" not in row  # 6 batches of 8 images in 8 s each
