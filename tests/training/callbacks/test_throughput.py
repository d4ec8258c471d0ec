"""Peaks and memory of devices."""

from types import SimpleNamespace

import pytest
import torch

from vlm.training.callbacks.speed import PEAKS, Throughput, peak_flop, peak_memory


def test_the_peak_is_that_of_the_device_and_precision(monkeypatch):
    cuda = torch.device("cuda", 0)
    name = "NVIDIA H200"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    for precision, expected in (("bf16-mixed", 989e12), ("16-mixed", 989e12), ("32-true", 67e12)):
        assert peak_flop(SimpleNamespace(precision=precision), cuda) == expected
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flop(SimpleNamespace(precision="32-true"), cuda) == 494e12
    name = "NVIDIA A10"  # no A100
    assert peak_flop(SimpleNamespace(precision="bf16-mixed"), cuda) is None
    assert peak_flop(SimpleNamespace(precision="32-true"), torch.device("cpu")) is None
    assert all(half >= tf32 >= single for half, tf32, single in PEAKS.values())


@pytest.mark.slow
def test_peak_memory_is_that_of_this_process():
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(before // 4)  # as much again
    assert 1.5 * before < peak_memory(torch.device("cpu")) < 3 * before
    del held


def test_compiling_is_not_training(monkeypatch):
    clock = {"now": 100.0, "compiling": 7.0}
    monkeypatch.setattr("vlm.training.callbacks.speed.time.perf_counter", lambda: clock["now"])
    monkeypatch.setattr("vlm.training.callbacks.speed.compiling.seconds", lambda: clock["compiling"])
    meter = Throughput()
    meter._images, meter.loader = 40, SimpleNamespace(waited=0.0)
    clock |= {"now": 135.0, "compiling": 37.0}  # 35 s, of which 30 went into compiling
    trainer = SimpleNamespace(world_size=1, precision="32-true")
    task = SimpleNamespace(device=torch.device("cpu"), counted_unit="tokens")
    assert meter.figures(trainer, task)["images_per_s"] == 8
