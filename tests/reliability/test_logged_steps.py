"""Loggers get the steps, epochs and values of an uninterrupted run, wherever a run ended or was stopped and goes on."""

import signal
from pathlib import Path
from typing import Any

import pytest
from compare import rows
from fork_server import ForkServer
from journey import interrupt_at, only_run
from small import BATCHES, command
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_faults import DDP, run_two

from vlm.training.run.fit import main

# A run that ends early must have taken the steps of a longer one: no schedule, and no test in between.
OPTIONS = ["schedule=constant", "schedule.warmup=0", "logger=tensorboard", "test=false", "trainer.max_epochs=-1"]
SMALL = command("language_modeling", *OPTIONS)


def read_logs(folder: Path) -> dict[str, Any]:
    """What the loggers of a run have, without what depends on the clock."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    board = {tag: sorted(pairs) for tag, pairs in scalars.items() if not tag.startswith("throughput/")}
    times = {tag: sorted(step for step, _ in scalars[tag]) for tag in scalars if tag.startswith("throughput/")}
    clock = [row.split(",")[0] for row in (folder / "throughput.csv").read_text().splitlines()]
    return {"metrics.csv": rows(folder), "TensorBoard": board, "its throughput": times, "throughput.csv": clock}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What uninterrupted runs of two and a half epochs logged, by the batches of a step."""
    return {size: read_logs(train(tmp_path_factory.mktemp("whole"), size, 20 // size)) for size in (1, 2)}


def train(runs: Path, size: int, steps: int) -> Path:
    steps_and_batches = [f"trainer.max_steps={steps}", f"trainer.accumulate_grad_batches={size}"]
    assert main([*SMALL, *steps_and_batches, f"runs={runs}"]) == 0
    return only_run(runs)


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_ended_with_an_epoch_goes_on(size: int, whole, tmp_path: Path) -> None:
    folder = train(tmp_path, size, BATCHES // size)
    for steps in (2 * BATCHES // size, 20 // size):
        assert main([f"resume={folder}", f"trainer.max_steps={steps}"]) == 0
    assert read_logs(folder) == whole[size]
    assert [row["step"] for row in whole[size]["metrics.csv"]] == [str(step) for step in range(20 // size)]


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_is_stopped_again_and_again_goes_on(size: int, whole, tmp_path: Path, monkeypatch) -> None:
    given = [*SMALL, f"trainer.max_steps={20 // size}", f"runs={tmp_path}", *batches(size)]
    for batch in (3, 7, 8, 19):  # amid an epoch, in its last and first batch, and in the last of all
        with monkeypatch.context() as patch:
            interrupt_at(batch // size, signal.SIGTERM, patch)
            assert main(given) == 143, batch
        given = [f"resume={only_run(tmp_path)}"]
    assert main(given) == 0
    assert read_logs(only_run(tmp_path)) == whole[size]


def batches(size: int) -> list[str]:
    return [f"trainer.accumulate_grad_batches={size}"]


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("size", [2, 1])
def test_two_processes_go_on(size: int, forks: ForkServer, tmp_path: Path) -> None:
    steps = [f"trainer.max_steps={count // size}" for count in (BATCHES, 20)]
    for name, runs in {
        "whole": [[*SMALL, *DDP, *batches(size), steps[1]]],
        "ended": [[*SMALL, *DDP, *batches(size), steps[0]], ["resume=last", steps[1]]],
    }.items():
        (tmp_path / name).mkdir()
        for options in runs:
            assert all(end.status == 0 for end in run_two(forks, options, cwd=tmp_path / name, timeout=120))
    whole, ended = (read_logs(only_run(tmp_path / name / "runs")) for name in ("whole", "ended"))
    assert ended == whole
