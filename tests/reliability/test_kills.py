"""Runs killed again and again, at random moments, end with bitwise what a run that nothing disturbed ends with."""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from compare import check_same
from fork_server import ForkServer, ProcessResult
from small import MODELS, TASKS, accumulation_options, command
from trainings import EPOCHS, Case, Training, ddp

from vlm.checkpoint import load as ckpt

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT


WORKERS = "data.num_workers=2"
# Pairs of what differs: signal, whom it reaches, processes, workers, accumulated batches, kind of model.
SLOW_CASES = [
    Case("captioning", KILL, "one", (), ranks=2),
    Case("classification", INT, "all", ("trainer.accumulate_grad_batches=2", "trainer.val_check_interval=3")),
    Case("bahdanau", KILL, "group", (WORKERS, *accumulation_options("bahdanau"))),
]
NIGHTLY_CASES = [
    Case("language_modeling", TERM, "group", (WORKERS,)),
    Case("captioning", KILL, "all", ("trainer.accumulate_grad_batches=3",)),
    Case("captioning", TERM, "group", (WORKERS,)),
    Case("classification", KILL, "all", (WORKERS, "trainer.val_check_interval=3")),
    Case("language_modeling", INT, "all", ()),
    Case("captioning", TERM, "all", ("trainer.accumulate_grad_batches=2",), ranks=2),
    Case("classification", TERM, "one", (), ranks=2),
    Case("language_modeling", KILL, "all", (), ranks=2),
    *(
        Case(task, KILL, "group", (WORKERS, *accumulation_options(task)))
        for task in [*TASKS, *MODELS]
        if task != "bahdanau"
    ),
]
CASES = [pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in SLOW_CASES]
CASES += [pytest.param(case, marks=pytest.mark.nightly, id=str(case)) for case in NIGHTLY_CASES]


@pytest.fixture(scope="module")
def begun(request, forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, Future]]:
    """The cases of one process that this session tests, two at a time."""
    tested = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        alone = [case for case in tested if isinstance(case, Case) and case.ranks == 1]
        yield {case: pool.submit(endure, case, forks, tmp_path_factory.mktemp("case")) for case in alone}


@pytest.mark.parametrize("case", CASES)
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(case: Case, forks, begun, tmp_path) -> None:
    if case in begun:
        begun[case].result()
    else:
        endure(case, forks, tmp_path)


def endure(case: Case, forks: ForkServer, place: Path) -> None:
    """Kills a training at random moments, lets it go on each time, and compares it with an undisturbed one."""
    whole, training = (Training(forks, case, place / name) for name in ("whole", "killed"))
    whole.start()  # beside the other
    rng = random.Random(str(case))
    killed = 0
    for turn in range(case.kills):
        training.start()
        # Anywhere: while it starts, in a step, in a save, in a validation, in the test at its end.
        target = 1 + int((turn + rng.random()) * case.steps / case.kills)
        if case.whom != "one" and rng.random() < 0.2:  # it is torchrun that ends the others while they wait for one
            target = 0
        if not training.kill_at(target, rng.uniform(0, 0.5 if target == 0 else 0.1), rng):
            break
        killed += 1
        check_ends(case, training.wait(60))
    training.start()
    final = [*training.wait(120), *whole.wait(120)]
    assert all(ended.status == 0 for ended in final), final
    assert training.folder and whole.folder and killed >= 3
    assert ckpt.read(whole.folder / "checkpoints" / "last.ckpt")["global_step"] == case.steps
    check_same(training.folder, whole.folder)


def check_ends(case: Case, ended: list[ProcessResult]) -> None:
    """A stopped run says so with its status; a killed one leaves no process behind, or says how to go on."""
    statuses = {end.status for end in ended}
    if case.signum == KILL:
        assert -KILL in statuses and (case.whom == "one" or statuses == {-KILL}), ended
    else:
        # A shell shows 143 for -SIGTERM too, which is how a process ends that has not got to its training yet.
        # 0: a rank that is not the first, when all saved; or the signal came too late. A single rank that is stopped
        # outside of training takes the others with it by their lost connection.
        assert statuses & {128 + case.signum, -case.signum} or statuses == {0} or case.whom == "one", ended
        assert all("Traceback" not in end.output for end in ended) or case.whom == "one", ended


FAIL = """
from vlm.training.step.task import Task
step = Task.training_step
def failing(self, batch, index):
    if self.global_step == 11:
        raise RuntimeError("a fault of this rank")
    return step(self, batch, index)
Task.training_step = failing
"""


@pytest.mark.nightly  # the slow case of two ranks goes on after one of them was killed
def test_after_an_exception_on_one_rank_a_run_goes_on_exactly(forks: ForkServer, tmp_path: Path) -> None:
    case = Case("captioning", KILL, "one", ranks=2)
    whole, training = (Training(forks, case, tmp_path / name) for name in ("whole", "failed"))
    training.start(patches=("", FAIL))
    first, second = training.wait(60)
    assert first.status and second.status and "a fault of this rank" in second.output
    whole.start()
    assert all(ended.status == 0 for ended in whole.wait(120))
    training.start()
    assert all(ended.status == 0 for ended in training.wait(120))
    assert training.folder and whole.folder
    check_same(training.folder, whole.folder)


@pytest.mark.slow
def test_ranks_that_lightning_starts_stop_together(forks: ForkServer, tmp_path: Path) -> None:
    """A signal to the first rank alone, as `kill` or a container sends it; the other one is its child."""
    case = Case("classification", TERM, "one", ranks=2)
    whole = Training(forks, case, tmp_path / "whole")
    whole.start()
    cwd = tmp_path / "stopped"
    cwd.mkdir()
    pid = forks.start(command(case.task, f"trainer.max_epochs={EPOCHS}", *ddp(2)), cwd=cwd)
    while not list(cwd.glob("runs/*/*/checkpoints/last.ckpt")):
        assert forks.wait(pid) is None, forks.wait(pid)
        time.sleep(0.02)
    os.kill(pid, TERM)
    ended = forks.wait(pid, 60)
    assert ended and ended.status == 143 and ended.output.count("the run is saved") == 1, ended
    again = forks.run(["resume=last"], cwd=cwd)
    assert again.status == 0, again
    assert all(ended.status == 0 for ended in whole.wait(120)) and whole.folder
    check_same(next(cwd.glob("runs/*/20*")), whole.folder)
