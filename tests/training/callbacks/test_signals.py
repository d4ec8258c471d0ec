"""What a signal says and does at once."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from vlm.training.callbacks.signals import StopOnSignal


@pytest.fixture
def sent() -> Any:
    """Sends this process a signal, handled as in a training of one process or of rank RANK."""
    handlers: list[tuple[StopOnSignal, Any]] = []

    def send(rank: int) -> Any:
        trainer = SimpleNamespace(is_global_zero=rank == 0)
        task: Any = SimpleNamespace(step=SimpleNamespace(received=0, trainer=trainer))
        callback = StopOnSignal()
        callback.on_train_start(trainer, task)  # type: ignore[arg-type]
        handlers.append((callback, task))
        os.kill(os.getpid(), signal.SIGINT)
        return task.step

    yield send
    for callback, task in handlers:
        callback.teardown(task.step.trainer, task, "fit")


def test_the_first_signal_is_answered_at_once_by_rank_zero(sent, capfd) -> None:
    assert sent(0).received == signal.SIGINT
    assert capfd.readouterr().err == "saving after this step, then stopping; a second signal stops without saving\n"
    assert sent(1).received == signal.SIGINT
    assert capfd.readouterr().err == ""


def test_the_second_signal_stops_now(sent, monkeypatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    sent(0)
    assert not statuses
    os.kill(os.getpid(), signal.SIGINT)
    assert statuses == [130]
