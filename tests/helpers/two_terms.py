"""Small tasks in double precision: one with two loss terms of different counts, one with a contrastive term."""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from vlm.data.samples import EvalBatches, TrainBatches
from vlm.tasks.contrastive.train import contrastive_loss
from vlm.training.data_module import StepLoader
from vlm.training.step.losses import Term
from vlm.training.step.optim import Constant, Optimization
from vlm.training.step.task import Task

SIZE, D, WEIGHT = 23, 5, 0.3  # a last batch of 3, which two ranks cannot share evenly


class Batch(NamedTuple):
    """Samples; those at `marked` have a second target."""

    ids: list[str]
    x: torch.Tensor
    y: torch.Tensor
    marked: torch.Tensor
    bad: tuple[Any, ...] = ()


class Data(L.LightningDataModule):
    """Random numbers in random order."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        numbers = torch.Generator().manual_seed(1)
        self.x, self.y = (torch.randn(SIZE, D, generator=numbers, dtype=torch.float64) for _ in range(2))

    def _ranks(self) -> dict[str, int]:
        return {"rank": self.trainer.global_rank, "world": self.trainer.world_size}

    def _position(self) -> tuple[int, int]:
        loop = self.trainer.fit_loop
        return loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready

    def _order(self, position: Any) -> TrainBatches:
        return TrainBatches(size=SIZE, batch_size=self.batch_size, seed=3, position=position, **self._ranks())

    def train_batches(self) -> int:
        return len(self._order(None))

    def read(self, keys: Any) -> Batch:
        index = torch.tensor([key.index for key in keys], dtype=torch.long)
        return Batch([str(i) for i in index.tolist()], self.x[index], self.y[index], (index % 4 == 0).nonzero()[:, 0])

    def train_dataloader(self) -> Any:
        return StepLoader(self.trainer, _Keys(), batch_sampler=self._order(self._position), collate_fn=self.read)

    def val_dataloader(self) -> Any:
        batches: Any = EvalBatches(size=7, batch_size=4, **self._ranks())
        return torch.utils.data.DataLoader(_Keys(), batch_sampler=batches, collate_fn=self.read)


class _Keys(torch.utils.data.Dataset):
    """The keys themselves, which `read` makes a batch of."""

    def __getitem__(self, key: Any) -> Any:
        return key


class TwoTerms(Task):
    """Every sample has a first target, and the marked ones a second."""

    def loss(self, batch: Batch) -> dict[str, Term]:
        hidden = self.model["trunk"](batch.x).tanh()
        first = (self.model["first"](hidden) - batch.y).square().sum()
        second = F.l1_loss(self.model["second"](hidden[batch.marked]), batch.y[batch.marked], reduction="sum")
        return {"first": Term(first, len(batch.x)), "second": Term(second, len(batch.marked), WEIGHT)}

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"first": len(batch.x), "second": len(batch.marked)}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluation.add_loss(self.loss(batch))

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        return {}

    def description(self) -> dict[str, Any]:
        return {}


class Contrastive(TwoTerms):
    """Pairs of a batch are told from one another."""

    def loss(self, batch: Batch) -> dict[str, Term]:
        x, y = self.model["second"](self.model["trunk"](batch.x)), self.model["first"](batch.y)
        scale = self.model["second"].bias[0].exp()
        return {"pairs": Term(*contrastive_loss(F.normalize(x), F.normalize(y), scale))}

    def counts(self, batch: Batch) -> None:
        return None

    @classmethod
    def compares_samples(cls, options: Any) -> bool:
        return True


class Watch(L.Callback):
    """Notes each step's losses and each batch's counts; saves after the first step where a file is named."""

    def __init__(self, save: Path | None) -> None:
        self.save, self.steps = save, 0
        self.losses: list[dict[str, float]] = []
        self.marked: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.marked.append(len(batch.marked))
        if trainer.global_step == self.steps:
            return
        self.steps = trainer.global_step
        self.losses.append({name: value.item() for name, value in trainer.callback_metrics.items() if "train" in name})
        if self.save and self.steps == 1:
            trainer.save_checkpoint(self.save)


def run(kind: str, batch_size: int, out: Path, *, accumulate: int = 1, ranks: int = 1, **options: Any) -> None:
    """Trains two epochs and writes weights, losses of steps and of validations to a JSON file.

    Args:
        kind: Name of a task's class here.
        options: `save`, a file that the state after the first step goes to; `resume`, one to go on from; others are the
            trainer's.
    """
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(D, D, dtype=torch.float64) for name in ("trunk", "first", "second")})
    optimization = Optimization(optimizer=partial(torch.optim.SGD, lr=0.1), schedule=Constant(), weight_decay=0.0)
    task = globals()[kind](model=model, fields={}, optimization=optimization, seed=0)
    watch, resume = Watch(options.pop("save", None)), options.pop("resume", None)
    trainer = L.Trainer(
        **{"accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "callbacks": [watch]},
        **{"precision": "64-true", "max_epochs": 2, "accumulate_grad_batches": accumulate, "log_every_n_steps": 1},
        **{"use_distributed_sampler": False, "num_sanity_val_steps": 0, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False, **options},
    )
    trainer.fit(task, datamodule=Data(batch_size), ckpt_path=resume, weights_only=True)
    weights = {name: tensor.tolist() for name, tensor in task.model.state_dict().items()}
    found = {"weights": weights, "losses": watch.losses, "val": task.evaluation.results, "marked": watch.marked}
    (out if ranks == 1 else out.with_suffix(f".{trainer.global_rank}.json")).write_text(json.dumps(found))
