"""Evaluates a checkpoint like the test after training, also models that were not trained by vlm."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.rebuild import convert_errors
from vlm.checkpoint.stored import Checkpoint, Metadata, isolate_config, thaw
from vlm.config import target
from vlm.config.compose import compose, override
from vlm.config.tree import Config, replace, resolve
from vlm.data.text.prompt_form import reads_images_inside_texts
from vlm.errors import UserError
from vlm.evaluation.report.content import TrainedModel
from vlm.models.decoder import TextDecoder
from vlm.models.image_decoder import ImageTokenDecoder
from vlm.models.recurrent import RecurrentEncoder
from vlm.models.text_encoder import TextEncoder
from vlm.models.word_encoder import WordEncoder
from vlm.nn.image_size import as_override, sides
from vlm.training.callbacks.progress import Progress
from vlm.training.config.check import check
from vlm.training.config.folder import list_prompt_tasks, prompt_field_overrides
from vlm.training.config.nodes import check_effective, check_fit, split_option
from vlm.training.data_module import Data
from vlm.training.run.build import build_data, build_start, build_task, build_trainer, cache_folder, find_init_paths
from vlm.training.run.run import evaluate_split
from vlm.training.run.train import silence_libraries
from vlm.training.step.task import Task

MAX_TEXT_TOKENS = 1024  # limit for scored texts, even if the model reads more


def compose_for_model(path: str, about: Metadata, overrides: Sequence[str]) -> Config:
    """Returns the task's default config with the model's sizes and the overrides applied.

    Args:
        path: The checkpoint.
        about: The metadata of the checkpoint.
        overrides: Overrides that choose the data; one may name the task.
    Raises:
        UserError: The model is for another task, cannot be evaluated, or an override is invalid.
    """
    task = str(about["task"])
    if task == "embedding":
        raise UserError(f"{path}: contains only an encoder, so it has no scores; use a model with a task head")
    if reads_images_inside_texts(about):
        return _compose_for_prompts(path, about, overrides)
    if mismatched := [text for text in overrides if text.startswith("task=") and text != f"task={task}"]:
        raise UserError(f"{mismatched[0]}: {path} is a model for {task}; leave the override out")
    data_overrides = [text for text in overrides if not text.startswith("task=")]
    no_selection = "callbacks.checkpoints=null"  # these weights were not selected on a split
    return compose([f"task={task}", no_selection, *_size_overrides(about), *data_overrides], check)


def _compose_for_prompts(path: str, about: Metadata, overrides: Sequence[str]) -> Config:
    """Like `compose_for_model`, for a model that reads images inside its texts, which several tasks evaluate."""
    chosen = [text.partition("=")[2] for text in overrides if text.startswith("task=")]
    tasks = list_prompt_tasks(about)
    if (task := chosen[-1] if chosen else tasks[0]) not in tasks:
        raise UserError(f"task={task}: is not a task of {path}; choose {' or '.join(tasks)}")
    fields = prompt_field_overrides(task, str(ckpt.locate(path)), about)
    rest = [text for text in overrides if not text.startswith("task=")]
    return compose([f"task={task}", "callbacks.checkpoints=null", *_size_overrides(about), *fields, *rest], check)


def _size_overrides(about: Metadata) -> Iterator[str]:
    """Yields the overrides for the sizes and the decoding options of a checkpoint."""
    if "preprocess" in about:
        size = about["preprocess"]["image_size"]
        yield f"data.image_size={as_override(size)}"
        yield f"model.encoder.patch_size={gcd(*sides(size))}"  # valid for the task's default model, which is not used
    lengths = [*_find_values(about["model"], "max_len")]
    if lengths:
        yield f"data.max_len={min(about.get('max_len', MAX_TEXT_TOKENS), MAX_TEXT_TOKENS, *lengths)}"
    stored = about.get("decoding", {})
    if "max_tokens" in stored:
        yield f"task.max_tokens={stored['max_tokens']}"
        yield from (f"task.{name}={stored[name]}" for name in ("beam", "length_penalty") if name in stored)


def _find_values(spec: Any, name: str) -> Iterator[int]:
    """Yields the integer values of an argument at any depth of a specification."""
    for key, value in spec.items() if isinstance(spec, Mapping) else ():
        if key == name and type(value) is int:
            yield value
        yield from _find_values(value, name)


# Keys that only training reads (TRAINING_KEYS; below `trainer`: TRAINER_KEYS), and keys, at any depth, whose values the
# checkpoint stores (STORED_GROUPS).
TRAINING_KEYS = {"optim", "schedule", "schedule_steps", "logger", "callbacks", "name", "layer_decay", "resume", "trust"}
TRAINING_KEYS |= {"compile", "activation_checkpointing", "lr_factors"}
TRAINER_KEYS = {"max_epochs", "max_steps", "max_time", "accumulate_grad_batches", "gradient_clip_val"}
TRAINER_KEYS |= {"limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch"}
TRAINER_KEYS |= {"log_every_n_steps"}
STORED_GROUPS = {"model", "tokenizer", "preprocess", "augment"}


def is_ignored(key: str) -> bool:
    """Returns True for a key that an evaluation does not read."""
    group, *names = key.split(".")
    if group == "data" and names and names[0] not in target.parameters(Data):  # exists only to be interpolated
        return True
    if (group == "trainer" and TRAINER_KEYS.intersection(names)) or (group == "task" and names[:1] == ["teacher"]):
        return True
    return group in TRAINING_KEYS or bool(STORED_GROUPS.intersection([group, *names]))


def check_lengths(config: Config, model: nn.Module) -> None:
    """Checks that no text field allows more tokens than the model has positions.

    Raises:
        UserError: A field allows more. The message names its key.
    """
    kinds = TextDecoder | TextEncoder | RecurrentEncoder | WordEncoder
    parts = [part for part in model.modules() if not isinstance(part, ImageTokenDecoder)]  # it reads no text
    readers = [part for part in parts if isinstance(part, kinds)]
    for module in readers:
        for name, field in config["task"]["fields"].items():
            if field.get("max_len", 0) > module.max_len:
                raise UserError(
                    f"task.fields.{name}.max_len: {field['max_len']} exceeds the model's {module.max_len} positions; "
                    f"set data.max_len={module.max_len}"
                )


def compose_config(path: str, loaded: Checkpoint, overrides: list[str]) -> Config:
    """Returns the config of an evaluation: that of the checkpoint's run, or one for a model not trained by vlm.

    Raises:
        UserError: The stored config is refused, or an override is invalid or has no effect.
    """
    if "config" not in loaded["vlm"]:
        return compose_for_model(path, loaded["vlm"], overrides)
    with convert_errors(path):
        run_folder = ckpt.locate(path).resolve().parent.parent
        saved = resolve(isolate_config(thaw(loaded["vlm"]["config"]).tree, run_folder))
    config = override(saved.tree, overrides, check)
    check_effective(saved, overrides, is_ignored)
    return config


def open_data(path: str, loaded: Checkpoint, config: Config, stack: ExitStack) -> Data:
    """Returns the data of an evaluation, with what the checkpoint's training learned from its own.

    An evaluation must not write to another user's runs or to a read-only folder, so it uses the cache of the run only
    if that is writable, else a temporary one.
    """
    cache = cache_folder(config)
    is_writable = cache.is_dir() and os.access(cache, os.W_OK)
    runs = config["runs"] if is_writable else stack.enter_context(TemporaryDirectory(prefix="vlm-"))
    data = build_data(replace(config, runs=runs))
    with convert_errors(path):
        data.restore(loaded["vlm"])
    return data


def _no_start() -> nn.Module:
    raise UserError(
        "task.reference: missing, because vlm did not train this model; set it to a checkpoint or folder, or choose "
        "task.loss=simpo"
    )


def evaluate_checkpoint(
    path: str,
    overrides: list[str],
    stack: ExitStack,
    *,
    split: str | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    trust: str | None = None,
) -> tuple[Config, Task, Data, dict[str, float]]:
    """Evaluates a checkpoint.

    Args:
        stack: Owns the temporary files of the data; close it when the data are no longer read.
    Returns:
        The config, the task and the data that were used, and the results.
    Raises:
        UserError: The checkpoint, its data or an override is invalid.
    """
    silence_libraries()
    package, overrides = split_option(overrides, "trust")
    if package is not None:
        raise UserError(f"trust={package}: is an option of vlm train; use --trust {package}")
    if trust is not None:
        target.check_package(trust, "--trust ")
        target.trust(trust)
    loaded = ckpt.read(path)
    config = compose_config(path, loaded, overrides)
    if batch_size is not None:
        config["data"]["eval_batch_size"] = batch_size
    config["test"] = True  # although the run may have skipped its test
    config["trainer"] |= {"accelerator": {"cuda": "gpu"}.get(device, device), "devices": 1, "strategy": "auto"}
    check_fit(config)
    data = open_data(path, loaded, config, stack)  # may create a folder, hence after all checks
    split = split or data.final_split
    data.split(split)
    model = ckpt.load_model(loaded, trust=trust)
    check_lengths(config, model)
    task = build_task(config, model, data)
    is_external = "config" not in loaded["vlm"]  # not trained by a run of vlm
    task.use_start(_no_start if is_external else partial(build_start, config, data), loaded["vlm"])
    if is_external and (search := getattr(task, "search", None)) is not None:  # of a task that generates text
        search.use_stored_options(loaded["vlm"].get("decoding", {}), config["task"])
    steps = None if is_external else loaded["global_step"]
    is_on_training_data = not is_external and split == "train" and data.fingerprint() == loaded["vlm"]["data"]
    task.trained = TrainedModel(steps, is_external or bool(find_init_paths(config)), is_on_training_data)
    trainer = build_trainer(config, Path("."), logger=False, callbacks=[Progress()])
    results = evaluate_split(trainer, task, data, split)
    if not results:
        raise UserError("trainer.limit_test_batches: no batch remains to evaluate; set trainer.limit_test_batches=1.0")
    return config, task, data, results
