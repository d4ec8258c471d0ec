"""One run: trains and evaluates what its config describes, and saves the results."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
from torch import nn

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.load import ADAPTERS
from vlm.checkpoint.start import find_base_class
from vlm.checkpoint.stored import Checkpoint, freeze, isolate_config, thaw
from vlm.config.build import build
from vlm.config.target import signature, trusted_packages
from vlm.config.tree import Config, escape, resolve
from vlm.data.features import check_split
from vlm.errors import UserError, printable
from vlm.evaluation.report.content import TrainedModel
from vlm.evaluation.report.evaluation import Evaluation, pictures_of, write_results
from vlm.io.files import remove_unfinished
from vlm.machine import return_freed_memory
from vlm.models.pretrained.stack import Spec
from vlm.nn.step.frozen import fuse_frozen_layers
from vlm.nn.vocabulary_loss import compile_on_gpu
from vlm.training.callbacks.checkpoints import Checkpoints
from vlm.training.callbacks.loggers import FaultTolerantLogger
from vlm.training.callbacks.progress import Progress
from vlm.training.callbacks.signals import StopOnSignal, find_checkpoints
from vlm.training.callbacks.speed import CompileMessages
from vlm.training.config.nodes import check_fit
from vlm.training.data_module import Data
from vlm.training.image_cache import move_images_to_device, use_cached_features
from vlm.training.run.build import (
    build_data,
    build_model,
    build_optimization,
    build_start,
    build_task,
    build_trainer,
    cache_folder,
    fill_preprocessing,
    find_init_paths,
    load_initial_weights,
    print_split_notes,
    should_compile,
    uses_gpu,
)
from vlm.training.run.processes import broadcast_choice, check_devices, is_rank_zero, rank_zero_first
from vlm.training.run.run_folder import create_run_folder, write_run_config
from vlm.training.step import blocks as compiling
from vlm.training.step.blocks import Adapted, adapt, arrange
from vlm.training.step.fsdp import gather, load_full_weights, scatter
from vlm.training.step.optim import count_steps, schedule_note
from vlm.training.step.task import EvaluationState, Task


class Run:
    """A training run in its folder. Its parts are built in the order of their dependencies:

    ::

        folder ─► data ─► sizes ─► model ─► weights ─► compiled blocks ─┐
                   │                                                    ├─► task ─┐
                   └─► tokenizer, classes, fingerprint ─────────────────┘         ├─► trainer ─► checks
                                             callbacks, loggers (in the folder) ──┘

    The data determine sizes of the model. Weights are copied before blocks are compiled in place, which keeps parameter
    names. The trainer comes last, because it determines the number of ranks, which must divide the batch size. A
    resumed run must have the same data as before.

    Args:
        config: The resolved config.
        folder: The folder of a resumed run; None creates a new one.
        checkpoint: The checkpoint that a resumed run starts from.
    """

    def __init__(self, config: Config, *, folder: Path | None = None, checkpoint: Path | None = None) -> None:
        config = fill_preprocessing(config)
        self.config, self.checkpoint = config, checkpoint
        self.folder = folder or Path(broadcast_choice(lambda: str(create_run_folder(config))))
        loaded = None if checkpoint is None else ckpt.read(checkpoint, merge=False)
        self.compiled = should_compile(config)
        self.data = self._open_data(loaded)
        model, spec, adapted = self._build_model(loaded)
        self.task = build_task(config, model, self.data, optimization=build_optimization(config))
        self.task.use_start(partial(build_start, config, self.data), {} if loaded is None else loaded["vlm"])
        if not self.compiled and not uses_gpu(config):
            fuse_frozen_layers(model)
        self.task.about = {
            "model": spec,
            "config": cast(dict[str, Any], freeze(config.tree)),
            "data": self.data.fingerprint(),
        }
        self.task.about["typed"] = list(config.typed)
        if base_class := find_base_class(find_init_paths(config), loaded):
            self.task.about["base_class"] = base_class
        if adapted:
            self.task.about[ADAPTERS], self.task.base_weights = adapted
        nodes = config["callbacks"].items()
        callbacks = [build(node, f"callbacks.{name}") for name, node in nodes if node is not None]
        callbacks += [CompileMessages()] if self.compiled else []
        # Checkpoints and signals come last: they save the state that other callbacks update in a step.
        callbacks.sort(key=lambda built: (isinstance(built, StopOnSignal), isinstance(built, Checkpoints)))
        bar = any(isinstance(callback, Progress) for callback in callbacks)
        loggers = []
        for name, node in ((name, node) for name, node in config["logger"].items() if node):
            parameters = signature(node["_target_"]).arguments
            folders = {key: str(self.folder) for key in ("folder", "save_dir") if key in parameters}
            loggers.append(FaultTolerantLogger(build(node, f"logger.{name}", **folders), name))
        self.trainer = build_trainer(config, self.folder, callbacks=callbacks, logger=loggers, enable_progress_bar=bar)
        # trainer.world_size is the number of started processes, whatever the trainer is set to.
        check_batches(config, self.data, self.trainer.num_devices * self.trainer.num_nodes)
        if loaded is not None:
            before, now = loaded["vlm"]["data"], self.task.about["data"]
            if before != now:
                raise UserError(
                    f"data: the training data changed since the run was started (fingerprint {before}, now {now}); "
                    "restore the data, or start a new run"
                )
            self._print_schedule(loaded)

    def _build_model(self, loaded: Checkpoint | None) -> tuple[nn.Module, Spec, Adapted | None]:
        """Returns the model, ready to train, its specification for checkpoints, and its adapters."""
        config = self.config
        if loaded is None:
            model, spec = build_model(config, self.data.sizes)
            load_initial_weights(model, config, self.data.tokenizer)
        else:  # the checkpoint has the weights, so no pretrained weights are fetched
            model = ckpt.build_model(loaded, trust=trusted_packages())
            spec = cast(Spec, loaded["vlm"]["model"])
        adapted = adapt(model, config, find_init_paths(config), loaded)
        if loaded is not None and self.data.cache_features:  # features are computed with the weights of the run
            model.load_state_dict(ckpt.inference_weights({"state_dict": loaded["state_dict"]}))
        compiler = compiling.compiler(on_gpu=uses_gpu(config)) if self.compiled else None
        arrange(model, recompute=bool(config.get("activation_checkpointing")), compiled=compiler)
        if compiler and uses_gpu(config):
            compile_on_gpu(compiler)
        return_freed_memory()  # of weights that were read to be compared; activations would not fill its gaps
        return model, spec, adapted

    def _open_data(self, loaded: Checkpoint | None) -> Data:
        check_fit(self.config)
        config = self.config
        if loaded is not None:
            config = resolve(escape(isolate_config(config, self.folder)))
        self.cache = cache_folder(config)
        with rank_zero_first():  # rank zero fills the cache that the other ranks read
            data = build_data(config)
            if data.cache_features:
                check_split(data.split("train"), data.images[1])
            if loaded is not None:
                data.restore(loaded["vlm"])
                return data
            print_split_notes(config, data)
            for line in format_skipped(data.source.skipped) if is_rank_zero() else ():
                print(line, flush=True)
            data.prepare()
        return data

    def _print_schedule(self, loaded: Checkpoint) -> None:
        """Prints how the learning rate continues if the overrides of a resumed run change it."""
        saved, batches = thaw(loaded["vlm"]["config"]), self.data.train_batches()
        totals = [count_steps(batches, config["trainer"]) or 1 for config in (saved, self.config)]
        note = schedule_note(
            build_optimization(saved),
            build_optimization(self.config),
            (totals[0], totals[1]),
            loaded["global_step"],
            self.config["optim"]["lr"],
            "schedule_steps" if "schedule_steps" in saved else "+schedule_steps",
        )
        if note and is_rank_zero():
            print(note, flush=True)

    @property
    def checkpoints(self) -> Checkpoints:
        return find_checkpoints(self.trainer)

    def fit(self) -> None:
        """Trains to the end."""
        if self.trainer.is_global_zero and self.checkpoint is None:
            write_run_config(self.folder, self.config.tree)
        elif self.trainer.is_global_zero:
            for folder in (self.folder, self.folder / "checkpoints"):
                remove_unfinished(folder)  # files of a killed process
            earlier_results = self.folder / "evaluation" / self.data.final_split
            shutil.rmtree(earlier_results, ignore_errors=True)
        if self.data.cache_features:
            encoder, spec = self.task.model.get_submodule("encoder"), cast(Spec, self.task.about["model"])
            use_cached_features(self.trainer, self.data, encoder, spec["args"]["encoder"], self.cache)
        if self.data.images_on_device:
            move_images_to_device(self.data, self.trainer.strategy.root_device)
        self.trainer.fit(self.task, datamodule=self.data, ckpt_path=self.checkpoint, weights_only=True)

    def test(self) -> dict[str, float]:
        """Evaluates the best checkpoint on the final split and saves the results in the run's folder."""
        loaded = ckpt.read(self.checkpoints.best_or_last, merge=False)
        load_full_weights(self.task.model, ckpt.inference_weights(loaded))
        self.task.trained = TrainedModel(loaded["global_step"], bool(find_init_paths(self.config)))
        results = evaluate_split(self.trainer, self.task, self.data, self.data.final_split)
        if not results:  # trainer.limit_test_batches=0
            return results
        gather(self.task.model)  # rank zero writes the report, which needs the full model for its attention maps
        if self.trainer.is_global_zero:
            folder = self.folder / "evaluation" / self.data.final_split
            save_results(folder, self.task, results, self.data, checkpoint=self.checkpoints.best_or_last)
        scatter(self.task.model)
        return results

    def example(self) -> str:
        """Returns a command that uses the trained model."""
        folder = self.folder / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        return self.task.example(self.data, folder)


def check_batches(config: Config, data: Data, devices: int) -> None:
    """Checks that all devices get training samples, and that validation runs within an epoch.

    Raises:
        UserError: There are too few samples, or the interval between validations is longer than an epoch.
    """
    batches, interval = data.train_batches(), config["trainer"].get("val_check_interval")
    if type(interval) is int and interval > batches and config["trainer"].get("check_val_every_n_epoch", 1) is not None:
        raise UserError(
            f"trainer.val_check_interval: {interval} exceeds the {batches} batches of an epoch; set a lower value, or "
            "trainer.check_val_every_n_epoch=null to count batches across epochs"
        )
    check_devices(config["data"]["batch_size"], len(data.samples("train", training=True)), devices)


def format_skipped(skipped: Sequence[str], limit: int = 5) -> list[str]:
    """Returns lines about the records that a source skipped: the first few, and the number of further ones."""
    lines = [printable(f"skipped: {reason}") for reason in skipped[:limit]]
    return [*lines, f"skipped: {len(skipped) - limit} more"] if len(skipped) > limit else lines


def evaluate_split(trainer: L.Trainer, task: Task, data: Data, split: str) -> dict[str, float]:
    """Evaluates a task on a split; used by the test after training and by `vlm evaluate`."""
    data.test_split = split
    task.evaluation = EvaluationState(split)  # a test without batches must not return the scores of a validation
    trainer.test(task, datamodule=data, verbose=False)
    return task.evaluation.results


def save_results(folder: Path, task: Task, results: dict[str, float], data: Data, *, checkpoint: Path) -> None:
    """Writes the results of a task's last evaluation: scores, predictions, details and the report.

    Args:
        folder: Output folder, created if missing.
        results: The scores, named split/metric.
        data: The data module that was evaluated.
        checkpoint: The evaluated checkpoint.
    Raises:
        OSError: A file cannot be written.
    """
    name = (task.name or type(task).__name__).replace("_", " ").capitalize()
    evaluation = Evaluation(
        title=f"{name}: {data.source.name or type(data.source).__name__}",
        task=task.name,
        split=task.evaluation.split,
        used=task.evaluation.used,
        remark=task.remark,
        results=results,
        checkpoint=checkpoint,
        predictions=task.predictions(),
        details=task.details(),
        sections=task.report(),
        findings=task.findings(),
        verdict=task.verdict(),
        headlines=task.headlines,
        curves=task.curves,
    )
    write_results(folder, evaluation, picture=pictures_of(data.split(task.evaluation.split)))
