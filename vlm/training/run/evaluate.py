"""Evaluates a checkpoint as the test at the end of training does, also a model without a run."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from vlm.checkpoint.stored import contained, thaw
from vlm.config import target
from vlm.config.compose import compose, override
from vlm.config.tree import resolve
from vlm.data.text.prompt_form import reads_images_inside_texts
from vlm.errors import UserError
from vlm.evaluation.report.verdict import TrainedModel
from vlm.models.decoder import TextDecoder
from vlm.models.recurrent import RecurrentEncoder
from vlm.models.text_encoder import TextEncoder
from vlm.nn.image_size import as_override, sides
from vlm.training.callbacks.bad_samples import LIMIT
from vlm.training.config.check import check
from vlm.training.config.overrides import check_effective, split_option
from vlm.training.data_module import Data
from vlm.training.step.task import Task

LONGEST = 1024  # most tokens of a scored text, even if the model reads more


def foreign_config(path: str, about: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the task's default config with the model's sizes and the overrides applied.

    Args:
        path: The checkpoint.
        about: Its content besides the weights.
        overrides: They choose the data, and the task if they name one.
    Raises:
        UserError: The model is for another task, or an override is at fault.
    """
    task = str(about["task"])
    if task == "embedding":
        raise UserError(f"{path}: holds an encoder alone, which no split scores; give a model with a head")
    if reads_images_inside_texts(about):
        raise UserError(
            f"{path}: reads its images inside prompts, which an evaluation does not write; caption the images with "
            "`vlm caption --format jsonl --out FILE`, and compare with `vlm score`"
        )
    if asked := [text for text in overrides if text.startswith("task=") and text != f"task={task}"]:
        raise UserError(f"{asked[0]}: {path} holds a model for {task}; leave the override out")
    own = [text for text in overrides if not text.startswith("task=")]
    no_choice = "callbacks.checkpoints=null"  # no split chose these weights
    return compose([f"task={task}", no_choice, *_sizes(about), *own], check)


def _sizes(about: Mapping[str, Any]) -> Iterator[str]:
    if "preprocess" in about:
        size = about["preprocess"]["image_size"]
        yield f"data.image_size={as_override(size)}"
        yield f"model.encoder.patch_size={gcd(*sides(size))}"  # for the task's default model, which is not used
    lengths = [*_found(about["model"], "max_len")]
    if lengths:
        yield f"data.max_len={min(about.get('max_len', LONGEST), LONGEST, *lengths)}"
    stored = about.get("decoding", {})
    if "max_tokens" in stored:
        yield f"task.max_tokens={stored['max_tokens']}"
        yield from (f"task.{name}={stored[name]}" for name in ("beam", "length_penalty") if name in stored)


def _found(spec: Any, name: str) -> Iterator[int]:
    """Yields the values of an argument in all parts of a specification."""
    for key, value in spec.items() if isinstance(spec, Mapping) else ():
        if key == name and type(value) is int:
            yield value
        yield from _found(value, name)


# Config keys that only training reads (TRAINING, STEPS), and keys at any depth that the checkpoint holds (HELD).
TRAINING = {"optim", "schedule", "logger", "callbacks", "name", "layer_decay", "compile", "activation_checkpointing"}
TRAINING |= {"resume", "trust", "schedule_steps"}
STEPS = {"max_epochs", "max_steps", "max_time", "accumulate_grad_batches", "gradient_clip_val", "log_every_n_steps"}
STEPS |= {"limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch"}
HELD = {"model", "tokenizer", "preprocess", "augment"}


def is_ignored(key: str) -> bool:
    """Returns True for a key that an evaluation does not read; some of the data's keys only feed other keys."""
    group, *below = key.split(".")
    feeds = group == "data" and bool(below) and below[0] not in target.arguments(Data)
    feeds |= group == "trainer" and bool(STEPS.intersection(below))
    return feeds or group in TRAINING or bool(HELD.intersection([group, *below]))


def check_lengths(config: dict[str, Any], model: nn.Module) -> None:
    """Checks that texts are not longer than the model's positions.

    Raises:
        UserError: A field's texts are longer; the message names its key.
    """
    for module in model.modules():
        for name, field in config["task"]["fields"].items():
            if (
                isinstance(module, TextDecoder | TextEncoder | RecurrentEncoder)
                and field.get("max_len", 0) > module.max_len
            ):
                raise UserError(
                    f"task.fields.{name}.max_len: {field['max_len']} is more than the model's {module.max_len} "
                    f"positions; give data.max_len={module.max_len}"
                )


def with_writable_cache(config: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """The config with a writable cache: the run's if it has one, else a temporary one.

    An evaluation must not write to someone else's run or to a read-only folder.
    """
    own = Path(config["runs"]) / "cache"
    if own.is_dir() and os.access(own, os.W_OK):
        return config
    return config | {"runs": stack.enter_context(TemporaryDirectory(prefix="vlm-"))}


def unreadable_limit(config: dict[str, Any]) -> float:
    """The share of unreadable samples that the run's training accepts."""
    callback = config.get("callbacks", {}).get("bad_samples", {"limit": LIMIT})
    return 1.0 if callback is None else callback.get("limit", LIMIT)


def evaluation_of(
    path: str,
    overrides: list[str],
    stack: ExitStack,
    *,
    split: str | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    trust: str | None = None,
) -> tuple[dict[str, Any], Task, Data, dict[str, float]]:
    """Evaluates a checkpoint; returns the config, the task and the data that were used, and the results.

    Args:
        stack: Holds the data's temporary files; close it when the data are no longer read.
    Raises:
        UserError: The checkpoint, its data or an override is at fault.
    """
    from vlm.checkpoint import load as ckpt
    from vlm.checkpoint.rebuild import refusing
    from vlm.training.callbacks.progress import Progress
    from vlm.training.config.check import check
    from vlm.training.config.nodes import check_fit
    from vlm.training.run.run import build_data, build_task, build_trainer, evaluate, start_places
    from vlm.training.run.train import quiet

    quiet()
    package, overrides = split_option(overrides, "trust")
    if package is not None:
        raise UserError(f"trust={package}: is for training; give --trust {package} here")
    if trust is not None:
        target.check_package(trust, "--trust ")
        target.trust(trust)
    loaded = ckpt.read(path)
    foreign = "config" not in loaded["vlm"]  # not trained by a run of vlm
    if foreign:
        config = foreign_config(path, loaded["vlm"], overrides)
    else:
        with refusing(path):
            saved = resolve(contained(thaw(loaded["vlm"]["config"]).tree, ckpt.locate(path).resolve().parent.parent))
        config = override(saved.tree, overrides, check)
        check_effective(saved, overrides, is_ignored)
    if batch_size is not None:
        config["data"]["eval_batch_size"] = batch_size
    config["test"] = True  # the run may have left the test split unread
    config["trainer"] |= {"accelerator": {"cuda": "gpu"}.get(device, device), "devices": 1, "strategy": "auto"}
    check_fit(config)
    data = build_data(with_writable_cache(config, stack))  # may create a folder, hence after all checks
    with refusing(path):
        data.restore(loaded["vlm"])
    split = split or data.final_split
    data.split(split)
    model = ckpt.load_model(loaded, trust=trust)
    check_lengths(config, model)
    task = build_task(config, model, data)
    if foreign and (search := getattr(task, "search", None)) is not None:  # of a task that generates text
        search.follow(loaded["vlm"].get("decoding", {}), config["task"])
    steps = None if foreign else loaded["global_step"]
    has_seen = not foreign and split == "train" and data.fingerprint() == loaded["vlm"]["data"]
    task.trained = TrainedModel(steps, foreign or bool(start_places(config)), has_seen)
    trainer = build_trainer(config, Path("."), logger=False, callbacks=[Progress()])
    results = evaluate(trainer, task, data, split)
    if not results:
        raise UserError("trainer.limit_test_batches: leaves no batch to evaluate; give trainer.limit_test_batches=1.0")
    return config, task, data, results
