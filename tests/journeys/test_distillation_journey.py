"""Whole trainings of students: killed, without the teacher's file, on two processes, accumulated and compiled."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from compare import rows
from fork_server import ForkServer
from journey import best, interrupt_at, only_run, same_weights
from small import command
from trainings import ddp, places_of

from vlm.checkpoint import load as ckpt
from vlm.cli.main import run as vlm
from vlm.training.run.fit import main
from vlm.training.step import blocks as compiling

TASKS = ("captioning", "classification", "language_modeling", "text_classification")
CACHED = ["task.teacher.top_k=8", "task.teacher.cache=true"]
# In double precision: AdamW divides gradients by their size, so that rounding in float32 changes weights by 1e-5.
EXACT = ["trainer.precision=64-true", "model.size.dropout=0", "trainer.max_epochs=2", "test=false", "model.bias=false"]
FLOAT = ["trainer.precision=32-true", "+optim.eps=1e-4"]  # rounding has less effect on updates with a large eps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def train_teacher(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains a small teacher of a task once; returns its run."""
    runs = tmp_path_factory.mktemp("teachers")

    @cache
    def train(task: str) -> Path:
        assert main(command(task, "trainer.max_epochs=1", "test=false", "seed=7", f"runs={runs / task}")) == 0
        return only_run(runs / task)

    return train


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


def weights_of(runs: Path) -> dict[str, torch.Tensor]:
    return dict(ckpt.read(only_run(runs) / "checkpoints" / "last.ckpt")["state_dict"])


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(
            one[name], tensor, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name} {text}"
        )


@pytest.mark.parametrize("task", TASKS)
def test_a_killed_student_ends_with_the_same_weights(
    train_teacher: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    more = CACHED if task == "language_modeling" else []
    options = command(task, f"task.teacher.path={train_teacher(task)}", "trainer.max_epochs=2", "test=false", *more)
    assert main([*options, f"runs={tmp_path / 'whole'}"]) == 0
    with monkeypatch.context() as patch:
        interrupt_at(5, signal.SIGTERM, patch)
        assert main([*options, f"runs={tmp_path / 'killed'}"]) == 143
    folder = only_run(tmp_path / "killed")
    assert main([f"resume={folder}"]) == 0
    whole = only_run(tmp_path / "whole")
    assert same_weights(folder / "checkpoints" / "last.ckpt", whole / "checkpoints" / "last.ckpt")
    losses = [
        (float(row["train/loss"]), float(row["train/loss_teacher"])) for row in rows(whole) if "train/loss" in row
    ]
    assert len(losses) == 16 and all(loss > 0 for pair in losses for loss in pair)
    assert len([*tmp_path.rglob("*.teacher.npz")]) == 2 * bool(more)


def test_a_student_is_used_without_its_teacher_and_resumed_with_the_same_one_only(
    train_teacher: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(best(train_teacher("captioning")), "teacher.ckpt")
    options = command("captioning", "task.teacher.path=teacher.ckpt", "trainer.max_epochs=1")
    assert main(options) == 0
    run = only_run(tmp_path / "runs")
    loaded = ckpt.read(best(run))
    assert loaded["state_dict"].keys() == ckpt.read(best(train_teacher("captioning")))["state_dict"].keys()
    assert len(loaded["vlm"]["teacher"]) == 64
    Path("teacher.ckpt").rename("moved.ckpt")
    images = [str(path) for path in sorted((Path(__file__).parents[2] / "data" / "sample").glob("*.png"))[:1]]
    assert vlm(["caption", *images, "-c", best(run), "--device", "cpu"]) == 0
    assert vlm(["evaluate", "-c", best(run), "--device", "cpu", "--out", "scores"]) == 0
    scores = json.loads(Path("scores/metrics.json").read_text())
    own = json.loads((run / "evaluation" / "test" / "metrics.json").read_text())
    assert scores == pytest.approx(own, abs=1e-4)
    assert vlm(["evaluate", "-c", best(run), "task.teacher.weight=0.3"]) == 2
    assert "task.teacher.weight" in capsys.readouterr().err  # an override without effect
    assert vlm(["export", "plain", "-c", best(run), "--to", "safetensors"]) == 0
    assert vlm(["info", "-c", best(run)]) == 0
    capsys.readouterr()
    assert main(["resume=last", "trainer.max_epochs=2"]) == 2
    assert "teacher.ckpt: no such checkpoint" in capsys.readouterr().err
    shutil.copy(best(run), "teacher.ckpt")  # a model of the same kind and tokenizer
    assert main(["resume=last", "trainer.max_epochs=2"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "task.teacher.path: the teacher has other weights than when training began; restore teacher.ckpt" in said
    Path("moved.ckpt").rename("teacher.ckpt")
    assert main(["resume=last", "trainer.max_epochs=2"]) == 0


def test_accumulated_batches_take_the_steps_of_a_large_one(
    train_teacher: Callable[[str], Path], tmp_path: Path
) -> None:
    for name, more in {"large": [], "small": ["data.batch_size=4", "trainer.accumulate_grad_batches=2"]}.items():
        options = command("language_modeling", f"task.teacher.path={train_teacher('language_modeling')}", *EXACT, *more)
        assert main([*options, f"runs={tmp_path / name}"]) == 0
    assert_close(*(weights_of(tmp_path / name) for name in ("small", "large")))


@pytest.mark.parametrize("more", [[], CACHED, ["trainer=fsdp"]], ids=["read", "cached", "sharded"])
def test_two_processes_end_as_one(
    train_teacher: Callable[[str], Path], tmp_path: Path, forks: ForkServer, more: list[str]
) -> None:
    options = command("language_modeling", f"task.teacher.path={train_teacher('language_modeling')}")
    exact = [*EXACT, *(FLOAT if "trainer=fsdp" in more else [])]  # which does not train in double precision
    for ranks, chosen in {1: more if more == CACHED else [], 2: [*ddp(2), *more]}.items():
        (tmp_path / f"{ranks}").mkdir()
        places = places_of(ranks)
        pids = [forks.start([*options, *chosen, *exact], cwd=tmp_path / f"{ranks}", env=place) for place in places]
        ended = [forks.wait(pid, 200) for pid in pids]
        assert [end and end.status for end in ended] == [0] * ranks, ended
    weights = (weights_of(tmp_path / f"{ranks}" / "runs") for ranks in (1, 2))
    assert_close(*weights, tolerance=1e-5 if exact != EXACT else 1e-12)


@pytest.mark.skipif(compiling.missing(on_gpu=False) is not None, reason="needs a C++ compiler")
def test_a_compiled_student_ends_as_one_that_is_not(train_teacher: Callable[[str], Path], tmp_path: Path) -> None:
    for name, more in {"plain": [], "compiled": ["compile=true"]}.items():
        options = command("language_modeling", f"task.teacher.path={train_teacher('language_modeling')}", *EXACT, *more)
        assert main([*options, f"runs={tmp_path / name}"]) == 0
    assert_close(*(weights_of(tmp_path / name) for name in ("compiled", "plain")))
