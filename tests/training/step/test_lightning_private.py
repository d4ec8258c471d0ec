"""Each private name of Lightning does what vlm/training/step/lightning_private.py says; and no other file uses one."""

import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch.utils.data import DataLoader

from vlm.training.step import lightning_private
from vlm.training.step.lightning_private import ScriptLauncher

ROOT = Path(__file__).parents[3]
BATCHES = 4


class Module(L.LightningModule):
    """A weight that is trained on batches of one number; notes the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch.item())
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", batch.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(float(BATCHES))[:, None])

    val_dataloader = train_dataloader


class Log(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
        self.rows.append((step or 0, dict(metrics)))


def trainer_of(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    quiet: Any = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    common: Any = {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1, "num_sanity_val_steps": 0, **quiet}
    return L.Trainer(**{**common, "logger": False, "callbacks": list(callbacks), **options})


class Each(L.Callback):
    """Calls a function at the end of each training batch."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.function(trainer, batch_idx)


def test_a_step_is_logged_within_the_hook() -> None:
    log, lengths = Log(), []

    def now(trainer: L.Trainer, batch_idx: int) -> None:
        lightning_private.log_step_now(trainer)
        lengths.append(len(log.rows))

    trainer_of(Each(now), logger=log, limit_train_batches=1, limit_val_batches=0).fit(Module())
    assert lengths == [1] and "loss" in log.rows[0][1] and log.rows[0][0] == 0


def test_the_logged_step_is_set() -> None:
    log = Log()
    trainer_of(
        Each(lambda trainer, at: lightning_private.set_logged_step(trainer, 10 * at)), logger=log, limit_val_batches=0
    ).fit(Module())
    assert [step for step, _ in log.rows] == [0, 10, 20, 30]


def test_validations_are_foreseen() -> None:
    foreseen, done = [], []

    class Watch(L.Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            done.append(trainer.fit_loop.batch_idx)

    each = Each(lambda trainer, at: foreseen.extend([at] if lightning_private.is_validation_due(trainer) else []))
    trainer_of(each, Watch(), val_check_interval=2).fit(Module())
    assert foreseen == done == [1, 3]


def test_signals_are_left_to_us() -> None:
    ours = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    seen: list[Any] = []

    def look(trainer: Any, batch_idx: int) -> None:
        seen.append([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)])

    trainer = trainer_of(Each(look), limit_val_batches=0)
    replaced = trainer.fit_loop.epoch_loop
    assert callable(type(replaced)._broadcast_sigterm_tensor)
    lightning_private.leave_signals_to_us(trainer)
    trainer.fit(Module())
    assert seen == [ours] * BATCHES
    plain: list[Any] = []
    trainer_of(Each(lambda *_: plain.append(signal.getsignal(signal.SIGTERM))), limit_val_batches=0).fit(Module())
    assert plain[0] != ours[0]  # else there is nothing to leave to us any more


class Save(Each):
    """Saves after a batch, as one between two."""

    def __init__(self, path: Path, at: int, **options: Any) -> None:
        super().__init__(lambda trainer, index: trainer.save_checkpoint(path) if index == at else None)
        self.options = options

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        loops = checkpoint["loops"]["fit_loop"]
        lightning_private.as_between_batches(loops, epoch_batches=BATCHES, step=trainer.global_step, **self.options)


@pytest.mark.parametrize("at", [1, BATCHES - 1], ids=["middle", "last"])
def test_a_state_saved_in_a_hook_is_one_between_two_batches(at: int, tmp_path: Path) -> None:
    """Saved as `Checkpoints` saves; the resumed run goes on with the very next batch."""
    trainer_of(Save(tmp_path / "state.ckpt", at), limit_val_batches=0).fit(Module())
    resumed = Module()
    trainer = trainer_of(max_epochs=2, limit_val_batches=0)
    trainer.fit(resumed, ckpt_path=tmp_path / "state.ckpt", weights_only=True)
    assert trainer.global_step == 2 * BATCHES and trainer.current_epoch == 2
    # A plain loader starts anew within an epoch: the number of batches counts.
    assert len(resumed.seen) == 2 * BATCHES - at - 1


class EventRecorder(L.Callback):
    """Appends "batch" and "validation" to a list when one starts."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.events.append("validation")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.events.append("batch")


def test_a_validation_that_is_due_comes_first(tmp_path: Path) -> None:
    order: list[str] = []
    trainer_of(Save(tmp_path / "state.ckpt", BATCHES - 1, validation_due=True)).fit(Module())
    trainer_of(EventRecorder(order), max_epochs=2).fit(Module(), ckpt_path=tmp_path / "state.ckpt", weights_only=True)
    assert order == ["validation", *["batch"] * BATCHES, "validation"]


@pytest.mark.parametrize("last", [2, BATCHES], ids=["middle", "end"])
def test_the_last_step_is_validated_also_by_a_resumed_run(last: int, tmp_path: Path) -> None:
    order: list[str] = []

    def fit(*callbacks: L.Callback, **options: Any) -> L.Trainer:
        trainer = trainer_of(*callbacks, max_epochs=-1, max_steps=last)
        lightning_private.replace_loops(trainer)
        trainer.fit(Module(), **options)
        return trainer

    fit(EventRecorder(order), Save(tmp_path / "state.ckpt", last - 1, validation_due=True))
    assert order == [*["batch"] * last, "validation"]
    order.clear()
    assert fit(EventRecorder(order), ckpt_path=tmp_path / "state.ckpt", weights_only=True).global_step == last
    assert order == ["validation"]
    order.clear()
    fit(Save(tmp_path / "done.ckpt", last - 1))
    fit(EventRecorder(order), ckpt_path=tmp_path / "done.ckpt", weights_only=True)
    assert not order


def test_the_launcher_starts_a_process_for_each_further_device(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, cwd: started.append(env["LOCAL_RANK"]))
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # which the launcher sets, and the test takes back
    trainer = trainer_of(strategy="ddp", devices=3)
    lightning_private.use_launcher(trainer, ScriptLauncher)
    launcher: Any = trainer.strategy.launcher
    assert type(launcher) is ScriptLauncher
    launcher.start_children()
    assert started == ["1", "2"]


def test_processes_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launcher = ScriptLauncher(SimpleNamespace(), num_processes=2, num_nodes=1)  # type: ignore[arg-type]
    assert launcher.run(lambda x: x + 1, 1) == 2 and len(seen) == 1
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_a_mesh_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    module = "lightning.pytorch.strategies.model_parallel"
    monkeypatch.setattr(f"{module}._setup_device_mesh", lambda *sizes: made.append(sizes))
    monkeypatch.setattr(ParallelStrategy, "setup_environment", lambda self: None)
    monkeypatch.setattr(ModelParallelStrategy, "_setup_distributed", lambda self: None)
    monkeypatch.setattr(ModelParallelStrategy, "root_device", torch.device("cpu"))
    monkeypatch.setattr(ModelParallelStrategy, "lightning_module", SimpleNamespace())
    strategy = ModelParallelStrategy()
    lightning_private.shard_over_all_ranks(strategy, 4)
    strategy.setup_environment()
    assert made[0][:2] == (4, 1)


# An attribute of Lightning's objects, or an import from it, that begins with an underscore.
PRIVATE = re.compile(
    r"\b(?:trainer|strategy|fit_loop|epoch_loop|val_loop|loop|connector|\w+_connector)\._[a-z]\w*"
    r"|self\._(?:call_children_scripts|experiment|logger_connector|data_parallel_size|tensor_parallel_size)"
    r"|^\s*(?:from lightning.* import .*\b_\w+)|\b_SubprocessScriptLauncher\b|\"_batches_that_stepped\"",
    re.MULTILINE,
)


@pytest.mark.slow
def test_they_stand_in_one_file() -> None:
    place = Path(lightning_private.__file__)
    files = [ROOT / "train.py", *(ROOT / "vlm").rglob("*.py")]
    found = {path: PRIVATE.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {path for path, names in found.items() if names} == {place}
    assert 8 <= len(found[place]) <= 15
