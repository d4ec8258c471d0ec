"""A run that was interrupted and resumed ends with bitwise the weights of one that was not."""

import csv
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compare import check_same
from journey import interrupt_at, only_run, same_weights

from vlm.checkpoint import load as ckpt
from vlm.training.callbacks.bad_samples import BadSamples
from vlm.training.run.fit import main
from vlm.training.step import blocks as compiling
from vlm.training.step.optim import Cosine

DROPOUT = ["model.size.dropout=0.1", "trainer.max_epochs=3"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run of 18 steps that nothing disturbed."""
    runs = tmp_path_factory.mktemp("whole")
    assert main([*small, *DROPOUT, f"runs={runs}"]) == 0
    return only_run(runs) / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize(
    ("step", "signum", "status", "workers"),
    [
        pytest.param(3, signal.SIGINT, 130, 0, marks=pytest.mark.slow, id="in the first epoch"),
        pytest.param(5, signal.SIGTERM, 143, 0, marks=pytest.mark.nightly, id="at an epoch's last batch"),
        pytest.param(10, signal.SIGTERM, 143, 2, marks=pytest.mark.slow, id="with workers"),
    ],
)
def test_resume_is_exact(step, signum, status, workers, small, whole, tmp_path, monkeypatch, capsys) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(step, signum, patch)
        assert main([*small, *DROPOUT, f"runs={tmp_path}", f"data.num_workers={workers}"]) == status
    folder = only_run(tmp_path)
    assert f"resume={folder}" in capsys.readouterr().out
    assert main([f"resume={folder}"]) == 0
    assert only_run(tmp_path) == folder
    assert same_weights(folder / "checkpoints" / "last.ckpt", whole)
    mine, reference = (
        [(row["step"], row["train/loss"], row["val/loss"]) for row in csv.DictReader((run / "metrics.csv").open())]
        for run in (folder, whole.parents[1])
    )
    assert mine == reference


@pytest.mark.parametrize("last", [4, pytest.param(6, marks=pytest.mark.slow)], ids=["in an epoch", "at its end"])
def test_a_validation_after_the_last_step_is_saved_before_and_repeated(last, small, tmp_path, monkeypatch) -> None:
    limits = ["model.size.dropout=0.1", "trainer.max_epochs=-1", f"trainer.max_steps={last}"]
    assert main([*small, *limits, f"runs={tmp_path / 'whole'}"]) == 0
    saved: list[int] = []

    def stop(trainer, *args) -> None:
        if trainer.global_step == last and not saved:
            saved.append(ckpt.read(Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt")["global_step"])
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(BadSamples, "on_validation_batch_end", lambda self, trainer, *args: stop(trainer))
        assert main([*small, *limits, f"runs={tmp_path / 'stopped'}"]) == 143
    folder = only_run(tmp_path / "stopped")
    assert saved == [last] and not (folder / "evaluation").exists()
    assert main([f"resume={folder}"]) == 0
    check_same(folder, only_run(tmp_path / "whole"))


@pytest.mark.nightly  # step/test_blocks.py compiles blocks in a slow run
@pytest.mark.skipif(compiling.missing(on_gpu=False) is not None, reason="needs a C++ compiler")
def test_resume_of_a_compiled_run_is_exact(small, tmp_path, monkeypatch, capsys) -> None:
    """It goes on in a process that has compiled nothing, with the rows of another length first, all in less memory."""
    options = [*small, *DROPOUT, "compile=true"]
    assert main([*options, f"runs={tmp_path / 'a'}"]) == 0
    assert "compiled    in" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        interrupt_at(7, signal.SIGTERM, patch)
        assert main([*options, f"runs={tmp_path / 'b'}"]) == 143
    resumed = [sys.executable, str(ROOT / "train.py"), f"resume={only_run(tmp_path / 'b')}"]
    subprocess.run([*resumed, "activation_checkpointing=true"], check=True, timeout=300)
    a, b = (only_run(tmp_path / name) / "checkpoints" / "last.ckpt" for name in "ab")
    assert same_weights(a, b)


def test_a_finished_run_is_left_alone(trained: Path, capsys) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert main([f"resume={trained}"]) == 0
    assert "finished" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in trained.rglob("*")}


def test_only_the_machine_may_change_on_resume(trained: Path, capsys) -> None:
    """Another seed, global batch, data or tokenizer is refused, naming both values, and nothing is changed."""
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    changes = {"data.batch_size": ("8", "16"), "seed": ("0", "3"), "data.source.max_objects": ("2", "3")}
    changes |= {"tokenizer.vocab_size": ("8000", "77")}
    assert main([f"resume={trained}", *(f"{key}={new}" for key, (_, new) in changes.items())]) == 2
    said = capsys.readouterr().err
    for key, (old, new) in changes.items():
        assert f"{key}: was {old} and cannot become {new}" in said
    assert main([f"resume={trained}", "trainer.accumulate_grad_batches=2", "trainer.max_epochs=9"]) == 2
    assert "trainer.accumulate_grad_batches: is 1 and cannot become 2" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in trained.rglob("*")}


def test_a_run_whose_checkpoint_is_damaged_is_passed_over(trained: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs" / "a" / "1")
    newer = tmp_path / "runs" / "a" / "2" / "checkpoints" / "last.ckpt"
    newer.parent.mkdir(parents=True)
    newer.write_bytes(b"cut short")
    assert main(["resume=last"]) == 0
    said = capsys.readouterr()
    assert "skipped: runs/a/2" in said.err and "runs/a/1: the run is finished" in said.out


def test_nothing_to_resume_is_an_error(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["resume=last"]) == 2
    assert main(["resume=nowhere"]) == 2
    said = capsys.readouterr().err
    assert "resume=last" in said and "resume=nowhere" in said and "Traceback" not in said


@pytest.mark.slow
def test_a_timm_run_goes_on_without_the_file_of_its_weights(small_classes, tmp_path) -> None:
    """And so without a network, where they were fetched: the checkpoint holds all weights."""
    import timm

    file = tmp_path / "resnet10t.pth"
    torch.save(timm.create_model("resnet10t").state_dict(), file)
    plain = [*(text for text in small_classes if "patch_size" not in text), "data.source.train_scenes=24"]
    timm_run = [*plain, "model/encoder=timm", "model.encoder.name=resnet10t", f"model.encoder.weights={file}"]
    assert main([*timm_run, "trainer.max_epochs=1", f"runs={tmp_path / 'runs'}"]) == 0
    file.unlink()
    folder = only_run(tmp_path / "runs")
    assert main([f"resume={folder}", "trainer.max_epochs=2"]) == 0
    loaded = ckpt.read(folder / "checkpoints" / "last.ckpt")
    assert loaded["vlm"]["config"]["model"]["encoder"]["weights"] == str(file)  # of how the run began
    assert loaded["global_step"] > 0 and loaded["epoch"] == 1


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("held", [False, True])
def test_a_longer_schedule_is_announced_and_the_last_rate_can_be_kept(
    held: bool, trained: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    rates: list[float] = []
    record = lambda self, trainer, task, optimizer: rates.append(optimizer.param_groups[0]["lr"])  # noqa: E731
    monkeypatch.setattr(BadSamples, "on_before_optimizer_step", record)
    run = shutil.copytree(trained, tmp_path / "run")
    config = ckpt.read(run / "checkpoints" / "last.ckpt")["vlm"]["config"]
    schedule, highest = Cosine(warmup=config["schedule"]["warmup"]), config["optim"]["lr"]
    last = highest * schedule.factor(11, 12)
    options = ["schedule_steps=12", "task.beam=2", "task.length_penalty=0.5"] if held else []
    assert main([f"resume={run}", "trainer.max_epochs=3", *options]) == 0  # 18 steps instead of 12
    said = capsys.readouterr().out
    if held:
        assert f"learning rate: stays at {last:.1e}, as in the last of the 12 steps" in said
        assert rates == pytest.approx([last] * 6)
        assert ckpt.read(run / "checkpoints" / "last.ckpt")["vlm"]["config"]["task"]["beam"] == 2
    else:
        assert rates == pytest.approx([highest * schedule.factor(step, 18) for step in range(12, 18)])
        assert f"learning rate: was {last:.1e} in step 12 and continues at {rates[0]:.1e}" in said
        assert f"18 steps instead of 12; schedule_steps=12 keeps it at {last:.1e}\n" in said
