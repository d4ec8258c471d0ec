"""Ten steps say how long a run takes, and what would make a long one shorter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm.models.flop import Flop
from vlm.training.callbacks import speed as pace
from vlm.training.callbacks.speed import Pace, format_duration


class Model(torch.nn.Module):
    """A model of images in patches of 16 pixels."""

    def flop(self, image_size: int) -> Flop:
        return Flop(states=(image_size // 16) ** 2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, and the seconds of it that torch.compile took."""
    clock = [100.0, 0.0]
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(pace, "compiling", SimpleNamespace(seconds=lambda: clock[1]))
    return clock


def read_messages(
    clock: list[float], *, seconds: float, batches: int, epochs: int = 1, size: int = 224, **changes: Any
) -> list[str]:
    """What a run prints whose steps take so many seconds, with a slow validation after the fourth.

    The first and the sixth step compile.
    """
    printed: list[str] = []
    waits = changes.pop("waits", 0.0)
    loader = SimpleNamespace(waited=0.0)
    progress = SimpleNamespace(current=SimpleNamespace(ready=0))
    trainer: Any = SimpleNamespace(
        datamodule=SimpleNamespace(train_batches=lambda: batches),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        **{"limit_train_batches": 1.0, "accumulate_grad_batches": 1, "max_epochs": epochs, "max_steps": -1},
        **{"global_step": 0, "num_training_batches": batches, "train_dataloader": loader, "is_global_zero": True},
    )
    vars(trainer).update(changes)
    preprocess = SimpleNamespace(image_size=size)
    task: Any = SimpleNamespace(model=Model(), preprocess=preprocess, print=printed.append)
    callback = Pace()
    callback.on_train_start(trainer, task)
    for step in range(1, 31):
        clock[0] += 40.0 if step == 1 else seconds  # the first one warms up
        if step in (1, 6):
            clock[0], clock[1] = clock[0] + 90.0, clock[1] + 90.0
        loader.waited += waits * seconds
        trainer.global_step += 1
        progress.current.ready += 1
        callback.on_train_batch_end(trainer, task, None, None, step)
        if step == 4:
            callback.on_validation_start(trainer, task)
            clock[0] += 1000
            callback.on_validation_end(trainer, task)
        if printed:
            assert step == 11
            return printed[0].split("\n")
    return []


def test_an_epoch_and_the_run_are_reckoned_without_first_step_validations_and_compilation(clock) -> None:
    (line,) = read_messages(clock, seconds=2.0, batches=30, epochs=4)
    assert line == "pace        2 s per step, about 60 s per epoch of 30 steps, 4 min remaining, without validation"


def test_a_long_run_says_what_would_shorten_it(clock) -> None:
    line, shorter = read_messages(clock, seconds=6.0, batches=50, epochs=20, waits=0.5)
    assert "about 5 min per epoch" in line and "1 h 39 min remaining" in line
    assert "50% of the time is spent waiting for data" in shorter
    assert "data.image_size=112 (49 patches per image instead of 196)" in shorter
    assert shorter.endswith("trainer.max_epochs=3 (15 min)")


def test_small_images_and_runs_by_steps_get_other_advice(clock) -> None:
    changes = {"max_epochs": -1, "max_steps": 10_000}
    (line,) = read_messages(clock, seconds=1.0, batches=50, size=112, **changes)[1:]
    assert line == "shorter     trainer.max_steps=900 (15 min)"


def test_a_short_run_is_not_spoken_of(clock) -> None:
    assert read_messages(clock, seconds=0.1, batches=10, epochs=5) == []


@pytest.mark.parametrize(
    "seconds, words", [(45, "45 s"), (130, "2 min"), (5400, "1 h 30 min"), (100_000, "27 h 47 min")]
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words
