"""Numbers that are not finite end a run before they are anywhere they could stay."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from journey import only_run
from lightning.pytorch.plugins import MixedPrecision
from small import command
from training_faults import DDP, FAULTS, run_two

from vlm.checkpoint import load as ckpt
from vlm.training.run import run as run_module
from vlm.training.run.fit import main
from vlm.training.step import step as training_step
from vlm.training.step.losses import NotFiniteError, Term, refuse_non_finite, suspects
from vlm.training.step.task import Task

SMALL = command("language_modeling", "trainer.accumulate_grad_batches=2", "trainer.max_steps=6")


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for child in value.values() if isinstance(value, dict) else value:
            yield from tensors(child)


def check_finite(folder: Path) -> None:
    """Asserts that each checkpoint of a run is whole, and holds only finite numbers."""
    found = list((folder / "checkpoints").iterdir())
    assert found
    for path in found:
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors(ckpt.read(path)))


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets up a fault before the second batch of a step; gives the task and its weights as they then were."""

    def set_up(kind: str, step: int) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        train = Task.training_step

        def training_step(task: Task, batch: Any, batch_idx: int) -> Any:
            if task.global_step == step and batch_idx % 2 and not seen:
                seen["task"] = task
                seen["weights"] = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
                seen["ids"] = list(map(str, batch.ids))
                FAULTS[kind](task)
            return train(task, batch, batch_idx)

        monkeypatch.setattr(Task, "training_step", training_step)
        return seen

    return set_up


@pytest.fixture(params=[False, True], ids=["read at once", "read a step later"])
def later(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Has the host read a step's check when the next one is launched, as on a GPU."""
    monkeypatch.setattr(training_step, "runs_ahead", lambda device: request.param)
    return request.param


@pytest.mark.sample(slow=4)
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("step", [3, 4])
@pytest.mark.parametrize(("kind", "said"), [("nan loss", "the loss is not"), ("nan gradient", "the gradient is not")])
def test_the_run_stops_before_the_update(kind, said, step, precision, at_step, later, tmp_path, capsys) -> None:
    seen = at_step(kind, step - 1)
    assert main([*SMALL, f"runs={tmp_path}", f"trainer.precision={precision}"]) == 1
    folder, error = only_run(tmp_path), capsys.readouterr().err
    assert f"step {step}: {said} finite" in error and "Traceback" not in error
    assert "optim.lr" in error and "trainer.gradient_clip_val" in error and "trainer.precision" in error
    assert (f"resume={folder}" in error) == (precision == "bf16-mixed")  # in more bits it may go well
    assert str(folder / "checkpoints" / "last.ckpt") in error
    listed = [path.read_text() for path in folder.glob(f"not_finite_step_{step}_*.txt")]
    names = error + "".join(listed)
    assert all(name in names for name in seen["ids"])
    weights = seen["task"].model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in seen["weights"].items())
    check_finite(folder)
    assert ckpt.read(folder / "checkpoints" / "last.ckpt")["global_step"] == 2


@pytest.mark.slow
def test_a_step_read_later_trains_the_same(tmp_path, monkeypatch) -> None:
    for name, later in (("one", False), ("other", True)):
        monkeypatch.setattr(training_step, "runs_ahead", lambda device, later=later: later)
        assert main([*SMALL, f"runs={tmp_path / name}"]) == 0
    one, other = (ckpt.read(only_run(tmp_path / name) / "checkpoints" / "last.ckpt") for name in ("one", "other"))
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    assert len(pairs) > 50 and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.sample(slow=1)
def test_a_run_without_clipping_stops_too(at_step, later, tmp_path, capsys) -> None:
    at_step("nan gradient", 1)
    assert main([*SMALL, f"runs={tmp_path}", "trainer.gradient_clip_val=null"]) == 1
    error = capsys.readouterr().err
    assert "step 2: the gradient is not finite (of " in error and "no checkpoint was saved yet" in error


@pytest.mark.slow
def test_what_an_update_made_infinite_is_not_saved(tmp_path, monkeypatch, capsys) -> None:
    step = torch.optim.AdamW.step
    taken: list[int] = []

    def overflow(self: Any, closure: Any = None) -> Any:
        result = step(self, closure)
        taken.append(1)
        if len(taken) == 4:
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[0] = float("inf")
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    assert main([*SMALL, f"runs={tmp_path}"]) == 1
    error = capsys.readouterr().err
    assert "step 4: the checkpoint was not saved" in error and "state_dict.model." in error
    check_finite(only_run(tmp_path))


def scale_by(plugin: MixedPrecision, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has trainings scale their losses."""
    build = run_module.build_trainer

    def build_scaled(*args: Any, **kwargs: Any) -> Any:
        trainer = build(*args, **kwargs)
        trainer.strategy.precision_plugin = plugin
        return trainer

    monkeypatch.setattr(run_module, "build_trainer", build_scaled)


@pytest.mark.slow
def test_a_loss_scaler_keeps_its_own_counsel(at_step, tmp_path, monkeypatch) -> None:
    seen = at_step("nan gradient", 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # little enough for the loss of a step, a sum
    scale_by(MixedPrecision("16-mixed", "cpu", scaler), monkeypatch)
    assert main([*SMALL, f"runs={tmp_path}", "callbacks.ema=null"]) == 0
    assert seen and scaler.get_scale() == 4
    check_finite(only_run(tmp_path))


@pytest.mark.slow
def test_a_scaled_step_clips_as_an_unscaled_one(tmp_path, monkeypatch) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    plugin.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)  # type: ignore[method-assign]
    clipped = [*SMALL, "trainer.precision=32-true", "trainer.gradient_clip_val=0.01", "trainer.max_steps=2"]
    assert main([*clipped, f"runs={tmp_path / 'plain'}"]) == 0
    scale_by(plugin, monkeypatch)
    assert main([*clipped, f"runs={tmp_path / 'scaled'}"]) == 0
    one, other = (ckpt.read(only_run(tmp_path / name) / "checkpoints" / "last.ckpt") for name in ("plain", "scaled"))
    for name, tensor in one["state_dict"].items():
        torch.testing.assert_close(other["state_dict"][name], tensor, rtol=0, atol=1e-6)


def test_only_the_batches_at_fault_are_named() -> None:
    good = (["a", "b"], {"tokens": Term(torch.tensor(2.0), 1)})
    bad = (["c"], {"tokens": Term(torch.tensor(float("inf")), torch.tensor(1))})
    assert suspects([good, bad]) == (True, ["c"])
    assert suspects([good]) == (False, ["a", "b"])


def test_a_non_finite_tensor_is_found_wherever_it_is() -> None:
    class Trainer:
        global_step = 1

        class strategy:
            reduce_boolean_decision = staticmethod(lambda decision, all: decision)

    weights = {"a": [torch.ones(3), torch.tensor([1, 2])], "b": {"c": torch.zeros(0), "d": torch.ones(2).bfloat16()}}
    good = {"state_dict": weights, "callbacks": {"best": torch.tensor(float("inf"))}}
    refuse_non_finite(Trainer, good)  # type: ignore[arg-type]
    weights["b"]["d"][1] = float("nan")
    with pytest.raises(NotFiniteError, match=r"state_dict\.b\.d would not be finite"):
        refuse_non_finite(Trainer, good)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_rank_at_fault_is_named_and_both_stop(forks: ForkServer, tmp_path: Path) -> None:
    patch = "import training_faults; training_faults.strike('nan loss', step=3, rank=1)"
    one, two = run_two(forks, [*SMALL, *DDP], cwd=tmp_path, patch=patch)
    assert one.status == two.status == 1
    assert (
        "step 4: the loss is not finite" in one.output
        and "rank 1 read " in one.output
        and "rank 0 read" not in one.output
    )
    assert "error" not in two.output
    check_finite(only_run(tmp_path / "runs"))
