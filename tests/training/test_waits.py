"""Waits for the device in an optimiser step, counted on CPU tensors: what the host would have to read from a GPU."""

import traceback
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from small import TASKS, command
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from waits import wait_of

from vlm.training.run.fit import main
from vlm.training.step import step as training_step
from vlm.training.step.step import StepState

FIRST, LAST = 4, 7  # steps that are watched: moments and metrics exist by then


class Waits(TorchDispatchMode):
    """Counts, by line of the package, operations that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := wait_of(func, args)) is not None:
            frames = [f for f in traceback.extract_stack() if "/vlm/" in f.filename or "/lightning/" in f.filename]
            own = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-2:]))
            self.lines[f"{name} {own}"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Counts in some steps of a training, from each batch's arrival on."""
    counter, fetch, advance = Waits(), _DataFetcher.__next__, _TrainingEpochLoop.advance

    def fetch_uncounted(self: Any) -> Any:
        with _disable_current_modes():
            return fetch(self)

    def advance_counted(self: Any, data_fetcher: Any) -> None:
        with counter if FIRST <= self.global_step < LAST else nullcontext():
            advance(self, data_fetcher)

    monkeypatch.setattr(_DataFetcher, "__next__", fetch_uncounted)
    monkeypatch.setattr(_TrainingEpochLoop, "advance", advance_counted)
    return counter


@pytest.fixture
def answers(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The step in which each check was sent to the host, at each time that the host read one, in the watched steps.

    The check is read at its own step where it is waited for. Else the GPU has long done what it is of.
    """
    seen: list[int] = []
    read_check = StepState.read_check

    def read(step: StepState) -> None:
        now = step.trainer.global_step
        if step.check is not None and FIRST <= now < LAST:
            seen.append(now + 1 - step.check.step)
        with _disable_current_modes():
            read_check(step)

    monkeypatch.setattr(StepState, "read_check", read)
    return seen


@pytest.mark.sample(plain=2, slow=6)
@pytest.mark.parametrize("later", [False, True], ids=["at once", "a step later"])
@pytest.mark.parametrize("task", TASKS)
def test_a_step_waits_for_no_more_than_its_check(task, later, waits, answers, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(training_step, "runs_ahead", lambda device: later)
    options = [option for option in command(task) if option != "callbacks.progress=null"]
    unmixed = ["task.mixup=0", "task.cutmix=0"] if task == "classification" else []  # torchvision draws on the CPU
    rare = ["callbacks.checkpoints.every_n_steps=100", "trainer.log_every_n_steps=100", "trainer.limit_val_batches=0"]
    assert main([*options, *unmixed, *rare, "trainer.max_steps=8", f"runs={tmp_path}"]) == 0
    assert not waits.lines
    assert answers == [int(later)] * (LAST - FIRST)
