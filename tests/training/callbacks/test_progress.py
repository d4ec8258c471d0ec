"""The bar shows the whole run, by time, and leaves nothing of itself behind."""

import io
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm.training.callbacks import progress
from vlm.training.callbacks.progress import Progress


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=screen, stdout=screen))
    return screen


class Clock:
    """A clock that stands still until it is moved.

    Attributes:
        now: Its time in seconds.
    """

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def run(*, step: int, epochs: int = 4) -> Any:
    """A trainer of some epochs of ten batches, at a step."""
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1e-3}
    return SimpleNamespace(
        datamodule=SimpleNamespace(train_batches=lambda: 10),
        **{"limit_train_batches": 1.0, "accumulate_grad_batches": 1, "max_epochs": epochs, "max_steps": -1},
        **{"global_step": step, "world_size": 1, "progress_bar_metrics": {}, "num_val_batches": [3]},
        **{"optimizers": [SimpleNamespace(param_groups=[group])], "sanity_checking": False},
    )


TASK: Any = SimpleNamespace(size=lambda batch: 8, step=SimpleNamespace(loss=0.5), unit="images")


def start_bar(**given: Any) -> tuple[Progress, Any]:
    """The bar of a trainer, at the beginning of its training."""
    bar, trainer = Progress(), run(**given)
    bar.on_train_start(trainer, TASK)
    return bar, trainer


def step(bar: Progress, trainer: Any) -> None:
    trainer.global_step += 1
    bar.on_train_batch_end(trainer, TASK, None, None, trainer.global_step - 1)


def drawn_lines(screen: Screen) -> list[str]:
    return [line.strip() for line in re.split(r"[\r\n]|\x1b\[\w", screen.getvalue()) if line.strip()]


def test_a_step_is_drawn_as_time_goes_and_counts_in_the_whole_run(screen, clock) -> None:
    bar, trainer = start_bar(step=0)
    for _ in range(3):
        clock.now += 0.1
        step(bar, trainer)
    assert len(drawn_lines(screen)) == 1 and "1/40" in drawn_lines(screen)[0]  # half a second has not gone by
    clock.now += 0.5
    step(bar, trainer)
    last = drawn_lines(screen)[-1]
    assert last.startswith("10%|") and "4/40" in last and "loss 0.500" in last and "images/s" in last and "left" in last


def test_a_resumed_run_goes_on_where_it_was_and_reckons_with_its_own_steps(screen, monkeypatch) -> None:
    monkeypatch.setattr(progress, "TERMINAL_SECONDS", 0.0)
    begin = time.monotonic()
    bar, trainer = start_bar(step=24)
    bar.on_validation_batch_end(trainer, TASK, None, None, 0)
    assert "24/40, validation 1/3" in drawn_lines(screen)[-1]  # there is no estimate before a step
    time.sleep(0.2)
    step(bar, trainer)
    took, last = time.monotonic() - begin, drawn_lines(screen)[-1]
    assert "25/40" in last and "?" not in last
    minutes, seconds = re.search(r"(\d\d):(\d\d) left", last).groups()
    assert 15 * 0.2 - 1 <= 60 * int(minutes) + int(seconds) <= 15 * took  # 15 steps like the one that this run took


def test_a_validation_and_what_others_print_take_turns_with_it(screen, monkeypatch) -> None:
    monkeypatch.setattr(progress, "TERMINAL_SECONDS", 0.0)
    bar, trainer = start_bar(step=0)
    step(bar, trainer)
    bar.on_validation_batch_end(trainer, TASK, None, None, 1)
    assert "1/40" in drawn_lines(screen)[-1] and "validation 2/3" in drawn_lines(screen)[-1]
    bar.print("a line")
    assert "a line" in drawn_lines(screen)


@pytest.mark.parametrize("end", ["on_exception", "on_train_end"])
def test_an_ended_bar_is_not_drawn_again(end, screen, monkeypatch) -> None:
    bar, trainer = start_bar(step=0)
    step(bar, trainer)
    length = len(screen.getvalue())
    getattr(bar, end)(trainer, TASK, *([KeyboardInterrupt()] if end == "on_exception" else []))
    assert not screen.getvalue()[length:].strip()


def test_a_file_gets_lines(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "FILE_SECONDS", 0.0)
    bar, trainer = start_bar(step=0)
    step(bar, trainer)
    step(bar, trainer)
    bar.on_train_end(trainer, TASK)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "2/40" in lines[1] and "\r" not in "".join(lines)


def test_a_run_without_an_end_counts_its_steps(screen) -> None:
    bar, trainer = start_bar(step=0, epochs=-1)
    step(bar, trainer)
    assert drawn_lines(screen)[-1].startswith("1 steps, 00:00, loss 0.500")


def test_epochs_that_end_before_the_steps_that_were_asked_for_are_noted(screen) -> None:
    for most, notes in ((-1, 0), (40, 0), (41, 1)):
        bar, trainer = Progress(), run(step=0)
        trainer.max_steps = most
        bar.on_train_start(trainer, TASK)
        assert screen.getvalue().count("ends the training after 40 steps, before trainer.max_steps=41") == notes
