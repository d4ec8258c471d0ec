"""Small tasks of distillation, as a run builds them: the teachers are the tiny checkpoints of tests/checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny_checkpoints import COMMON, FILES
from tiny_checkpoints import TASKS as OPTIONS

from vlm.config.compose import compose
from vlm.data.batch import Batch
from vlm.training.config.check import check
from vlm.training.run.build import build_data, build_model, build_task

TEXT = f"tokenizer=pretrained tokenizer.path={FILES / 'language_modeling.ckpt'}".split()
MORE = {"classification": ["task.mixup=0.4", "task.cutmix=0.5"], "language_modeling": TEXT}
MORE["classification"] += ["data.augment.min_scale=0.6", "data.augment.horizontal_flip=true"]


def student_options(name: str, *options: str) -> list[str]:
    more = [] if any(option.startswith("tokenizer=") for option in options) else MORE.get(name, [])
    return [f"task={name}", *COMMON, *OPTIONS[name], "model.size.dropout=0.1", *more, *options]


def build(name: str, *options: str, teacher: Path | None = None) -> Any:
    """A task with a student of random weights, and its data."""
    path = FILES / f"{name}.ckpt" if teacher is None else teacher
    config = compose(student_options(name, f"task.teacher.path={path}", *options))
    check(config)
    data = build_data(config)
    data.prepare()
    task: Any = build_task(config, build_model(config, data.sizes)[0], data)
    task._trainer = SimpleNamespace(
        datamodule=data,
        world_size=1,
        global_rank=0,
        is_global_zero=True,
        precision="32-true",
        precision_plugin=SimpleNamespace(forward_context=torch.no_grad),
    )
    return task


def first_batch(task: Any) -> Batch:
    return next(iter(task.data.train_dataloader()))
