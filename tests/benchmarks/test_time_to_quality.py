"""Time to quality: the clock that both sides follow, and the benchmark on drawn scenes and on a line of text."""

import json
import math
import sys
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from flickr import draw_flickr8k
from scripts import TINY, load

from vlm.config.compose import compose
from vlm.training.step.optim import Cosine

SMALL = [*TINY, "data.batch_size=4"]
SHORT = ["task.sampled_batches=1", "task.prompt_tokens=2"]


@pytest.fixture
def now(monkeypatch):
    """The time, set by hand."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("time.perf_counter", lambda: now.seconds)
    return now


def test_the_clock_stands_still_in_validations(now, monkeypatch):
    clock = load("time_budget", monkeypatch).Clock(seconds=40, points=4)
    now.seconds += 5  # before training
    clock.go()
    assert clock.seconds_spent == 0 and not clock.due
    now.seconds += 9
    clock.go()
    assert clock.seconds_spent == 9 and not clock.due
    now.seconds += 2
    assert clock.due and not clock.is_over
    clock.pause()
    now.seconds += 30
    assert clock.seconds_spent == 11 and not clock.due
    clock.go()
    now.seconds += 29
    assert clock.due and clock.is_over


def test_the_learning_rate_ends_with_the_time(now, monkeypatch):
    module = load("time_budget", monkeypatch)
    clock = module.Clock(seconds=40, points=4)
    timed = module.BudgetedSchedule(Cosine(warmup=0.1), clock)
    clock.go()
    rates = []
    for step in range(41):
        rates.append(timed.factor(step))
        now.seconds += 0.5 if step < 20 else 1.5  # the machine becomes slower
    assert rates[0] < 1e-3 and rates[2] < rates[7] < 1 and max(rates) == pytest.approx(1, abs=0.05)
    assert rates[20] == pytest.approx(Cosine(warmup=0.1).factor(25, 100), abs=0.02)  # a quarter of the time
    assert rates[40] == pytest.approx(0, abs=1e-2)


def test_other_seeds_take_the_best_rate_and_finished_trainings_stay(tmp_path, monkeypatch):
    module = load("time_to_quality", monkeypatch)
    made = []

    def train(side, seed, factor):
        made.append((side, seed, factor))
        return [{"seconds": 1.0, "loss": abs(factor - 2) + seed}]

    settings = {"ours": {"minutes": 1}, "peer": {"minutes": 1, "batch": 2}}
    for _ in range(2):
        kept = module.Curves(tmp_path, settings, train)
        assert [curve[-1]["loss"] for curve in kept.best("peer", [0, 1], [1.0, 2.0])] == [0, 1]
    assert made == [("peer", 0, 1.0), ("peer", 0, 2.0), ("peer", 1, 2.0)]
    module.Curves(tmp_path, {"peer": {"minutes": 2, "batch": 2}}, train).curve("peer", 0, 1.0)
    assert len(made) == 4


@pytest.mark.slow
def test_losses_of_both_sides_are_a_captions(tmp_path, monkeypatch):
    module = load("tuned_peers", monkeypatch)
    draw_flickr8k(tmp_path)
    overrides = ["experiment=captioning_flickr8k", f"data.root={tmp_path}", f"runs={tmp_path / 'runs'}", *SMALL]
    peer = module.Captions(compose(overrides), 4)
    photos, model = peer.photos["val"], peer.model()
    count = sum(batch["captions"].targets.count for batch in peer.data.eval_dataloader("val"))
    captions = len(photos.lengths)
    assert peer.validation_data == f"8 photos with {captions} captions" and peer.tokens * captions == pytest.approx(
        count
    )
    model.decoder.lm_head.weight.data.zero_()
    loss = peer.validate(model.eval())["loss"]
    assert loss == pytest.approx(peer.tokens * math.log(peer.data.tokenizer.vocab_size), rel=1e-4)
    least, most = photos.normal(torch.arange(8)).aminmax()
    assert -1 <= least < 0 < most <= 1
    for pixels, ids in islice(peer.batches(), 20):
        assert len(pixels) == len(ids) <= 4 and (ids[:, -1] != 0).any()


@pytest.fixture(params=["captions", pytest.param("text", marks=pytest.mark.nightly)])
def options(request, tmp_path):
    if request.param == "captions":
        draw_flickr8k(tmp_path)
        return ["--root", str(tmp_path), "--overrides", *SMALL]
    (tmp_path / "input.txt").write_text("ROMEO:\nBut, soft! what light through yonder window breaks?\n\n" * 60)
    return ["--text", str(tmp_path / "input.txt"), "--experiment", "shakespeare_cpu", "--overrides", *SHORT]


@pytest.mark.slow
def test_both_sides_learn_for_the_same_time(options, tmp_path, monkeypatch, capsys):
    module = load("time_to_quality", monkeypatch)
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["time_to_quality.py", "--out", str(out), "--minutes", "0.03", *options])
    module.main()
    table = capsys.readouterr().out
    files = sorted((out / "curves").iterdir())
    assert [file.name for file in files] == ["ours-seed0-rate1.json", "peer-seed0-rate1.json"]
    for row in (json.loads(file.read_text()) for file in files):
        seconds = [point["seconds"] for point in row["curve"]]
        assert seconds == sorted(seconds) and seconds[-1] >= 1.8 and len(seconds) <= 8
        losses = [point["loss"] for point in row["curve"]]
        assert 0 < losses[-1] <= losses[0] and set(row["curve"][0]) >= {"seconds", "loss"}
        assert ("cider" in row["curve"][0]) == ("--root" in options)
        assert f"{losses[-1]:.3f}" in table
    assert (out / "time_to_quality.png").stat().st_size > 5000
    times = [file.stat().st_mtime_ns for file in files]
    module.main()
    assert [file.stat().st_mtime_ns for file in files] == times and capsys.readouterr().out == table
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--side", "peer"])
    module.main()
    assert [file.stat().st_mtime_ns for file in files] == times and not capsys.readouterr().out
