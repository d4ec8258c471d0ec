"""Builds a run from its config, trains and evaluates it, and saves its results."""

import json
import shutil
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.load import ADAPTERS
from vlm.checkpoint.rebuild import rebuild_shapes
from vlm.checkpoint.start import find_base_class
from vlm.checkpoint.stored import Checkpoint, freeze, isolate_config, thaw
from vlm.config.build import build, spec
from vlm.config.target import find, signature, trusted_packages
from vlm.config.tree import Config, Tree, escape, origin, put, resolve, select, walk
from vlm.data.features import check_split
from vlm.data.fields import Field
from vlm.data.images.resize import INTERPOLATIONS
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import UserError, print_error, printable, printable_lines
from vlm.evaluation.report.content import TrainedModel
from vlm.evaluation.report.evaluation import Evaluation, pictures_of, write_results
from vlm.io.files import remove_unfinished
from vlm.machine import return_freed_memory
from vlm.models.pretrained.stack import Spec
from vlm.nn.device import has_bfloat16
from vlm.nn.embeddings import Spelling
from vlm.nn.image_size import sides
from vlm.nn.step.frozen import fuse_frozen_layers
from vlm.nn.vocabulary_loss import compile_on_gpu
from vlm.randomness import key
from vlm.training.callbacks.checkpoints import Checkpoints, VerifiedIO
from vlm.training.callbacks.loggers import FaultTolerantLogger
from vlm.training.callbacks.progress import Progress
from vlm.training.callbacks.signals import StopOnSignal, find_checkpoints
from vlm.training.callbacks.speed import CompileMessages
from vlm.training.config.nodes import check_fit, data_node, inject, model_node
from vlm.training.data_module import Data
from vlm.training.image_cache import move_images_to_device, use_cached_features
from vlm.training.run.faults import Launcher
from vlm.training.run.processes import broadcast_choice, check_devices, is_rank_zero, rank_zero_first
from vlm.training.run.run_folder import create_run_folder, write_run_config
from vlm.training.step import blocks as compiling
from vlm.training.step.blocks import Adapted, adapt, arrange
from vlm.training.step.fsdp import gather, load_full_weights, scatter
from vlm.training.step.lightning_private import leave_signals_to_us, use_launcher
from vlm.training.step.optim import Optimization, count_steps, schedule_note
from vlm.training.step.task import EvaluationState, Task

FEW_SAMPLES = 100  # size of a data set up to which a note says that no sample is in test
WEIGHT_KEYS = ("weights", "pretrained")  # arguments of encoders that say where weights come from
SHARED_OPTIONS = ("resize", "interpolation", "crop")  # options that training shares with evaluation


def fill_preprocessing(config: Config) -> Config:
    """Returns the config with unset preprocessing options set to those that its encoder expects."""
    encoder = config["model"].get("encoder") or {}
    encoder = encoder.get("backbone") or encoder
    prepares = getattr(find(encoder["_target_"]), "prepares", None) if encoder else None
    expected = prepares(**encoder) if prepares else {}
    if expected.get("interpolation") not in INTERPOLATIONS:  # timm has two more that few models use
        expected.pop("interpolation", None)
    parents = ["data", *(f"task.fields.{name}" for name in config["task"]["fields"])]
    parents = [parent for parent in parents if select(config, f"{parent}.preprocess")]
    filled = _fill_unset(config, {f"{parent}.preprocess": expected for parent in parents})
    nodes = {
        parent: select(filled, f"{parent}.preprocess") for parent in parents if select(filled, f"{parent}.augment")
    }
    shared = {f"{parent}.augment": {name: node.get(name) for name in SHARED_OPTIONS} for parent, node in nodes.items()}
    filled = _fill_unset(filled, shared)
    filled.typed = config.typed
    return filled


def _fill_unset(config: Config, values: dict[str, dict[str, Any]]) -> Config:
    """Returns the config with values for unset arguments of some nodes, by the key of the node."""
    unset: Tree = {}  # by the key where each is set
    for path, defaults in values.items():
        node = select(config, path)
        arguments = signature(node["_target_"]).arguments
        for name, value in defaults.items():
            if name in arguments and node.get(name) is None and value is not None:
                unset[origin(config.tree, f"{path}.{name}")] = escape(value)
    if not unset:
        return config
    tree = deepcopy(config.tree)
    for name, value in unset.items():
        put(tree, name, value)
    return resolve(tree)


def find_init_paths(config: Config) -> dict[str, str]:
    """Returns the `init_from` of the model ("") and of its parts, by part."""
    keys = {key.rpartition(".")[::2]: value for key, value in walk(config["model"]) if value is not None}
    return {part: str(value) for (part, name), value in keys.items() if name == "init_from"}


def load_initial_weights(
    model: nn.Module, config: Config, tokenizer: Tokenizer | None = None, *, prints: bool = True
) -> None:
    """Copies the weights named by `init_from` and prints which. Spelling modules get the bytes of the tokens."""
    if paths := find_init_paths(config):
        from vlm.checkpoint import start

        lines = start.start_from(model, paths, tokenizer, config.typed)
        if prints and is_rank_zero():
            print(printable_lines("\n".join(lines)), flush=True)
    for part in model.modules():
        if isinstance(part, Spelling):
            assert tokenizer is not None, "a model that spells tokens belongs to a task that reads texts"
            part.learn([tokenizer.bytes_of(id) for id in range(tokenizer.vocab_size)])


def cache_folder(config: Config) -> Path:
    """Returns the cache folder that runs share."""
    return Path(config["runs"]) / "cache"


def build_fields(config: Config) -> dict[str, Field]:
    """Builds the task's fields, by name; equal tokenizer configs share one tokenizer."""
    tokenizers: dict[str, Tokenizer] = {}
    fields = {}
    for name, node in config["task"]["fields"].items():
        path, options = f"task.fields.{name}", {key: value for key, value in node.items() if key != "tokenizer"}
        shared = {}
        if "tokenizer" in node:
            tokenizer_key = json.dumps(node["tokenizer"], sort_keys=True)
            if tokenizer_key not in tokenizers:
                tokenizers[tokenizer_key] = build(node["tokenizer"], f"{path}.tokenizer")
            shared["tokenizer"] = tokenizers[tokenizer_key]
        if "states" in node and node["states"] is None:
            options["states"] = _count_image_states(config)
        fields[name] = build(options, path, **shared)
    return fields


def _count_image_states(config: Config) -> int:
    """Returns the number of states of an image, from the shapes of the encoder."""
    node: Any = model_node(config)["encoder"]
    backbone = {name: value for name, value in node["backbone"].items() if name not in WEIGHT_KEYS}
    shapes = node | {"backbone": backbone}
    encoder = rebuild_shapes(cast(Spec, spec(shapes)))
    with torch.no_grad():
        states: Tensor = encoder(torch.empty(1, 3, *sides(config["data"]["image_size"]), device="meta")).states
    return states.shape[1]


def build_data(config: Config) -> Data:
    """Builds the data module with the task's fields, and opens its source."""
    node, fields = data_node(config), build_fields(config)
    needs = sorted({name for field in fields.values() for name in field.needs})
    node["source"] = inject(node["source"], {"needs": needs})
    options = {"order_seed": config["seed"], "cache": str(cache_folder(config)), "test": config.get("test", True)}
    data: Data = build(node, "data", fields=fields, **options)
    for note in data.source.notes if is_rank_zero() else ():
        print_error(note, "note")
    return data


def print_split_notes(config: Config, data: Data) -> None:
    """Prints which splits have one sample, or for test none, because a data set to train on is small."""
    if data.source.is_synthetic or "document" in data.source.holds or not is_rank_zero():
        return
    sizes = {name: len(split) for name, split in data.splits.items()}
    of_all = f"data: of {sum(sizes.values()):,} samples,"
    notes = [
        f"{of_all} 1 is in {name}, so its scores are unreliable; add samples"
        for name in ("val", "test")
        if sizes.get(name) == 1
    ]
    draws_test = config.get("test", True) and config["data"]["source"].get("test_fraction")
    if draws_test and "test" not in sizes and sum(sizes.values()) < FEW_SAMPLES:
        notes.append(f"{of_all} none is in test, so that a finished run is tested on val; add samples")
    for note in notes:
        print_error(note, "note")


def build_model(config: Config, sizes: dict[str, int]) -> tuple[nn.Module, Spec]:
    """Builds the model with weights drawn from the seed; also returns its specification for checkpoints.

    Args:
        sizes: Sizes that the data determine, passed to all classes with an argument of that name.
    """
    node = inject(model_node(config), sizes)
    torch.manual_seed(key(config["seed"], "weights"))
    try:
        return build(node, "model"), cast(Spec, spec(node))
    except ValueError as fault:
        raise UserError(f"model: {fault}") from fault


def build_start(config: Config, data: Data) -> nn.Module:
    """Builds the model with the weights from which a run of this config starts."""
    model, _ = build_model(config, data.sizes)
    load_initial_weights(model, config, data.tokenizer, prints=False)
    return model


def build_task(config: Config, model: nn.Module, data: Data, **injected: Any) -> Task:
    """Builds the task with the fields of its data."""
    node = {name: value for name, value in config["task"].items() if name != "fields"}
    return build(node, "task", model=model, fields=data.fields, seed=config["seed"], **injected)


def build_optimization(config: Config) -> Optimization:
    node = dict(config["optim"])
    if config["trainer"].get("precision") == "16-mixed":
        node.pop("fused", None)  # a fused optimizer unscales the gradients itself, after clipping
    return Optimization(
        optimizer=build(node, "optim"),
        schedule=build(config["schedule"], "schedule"),
        weight_decay=config["optim"].get("weight_decay", 0.0),
        layer_decay=config["layer_decay"],
        schedule_steps=config.get("schedule_steps"),
    )


def uses_gpu(config: Config) -> bool:
    """Returns True if the config trains on a GPU on this machine."""
    return config["trainer"]["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def should_compile(config: Config) -> bool:
    """Returns True if the model's blocks are to be compiled, by default on GPUs only.

    Raises:
        UserError: The config sets compile=true, but a requirement is missing.
    """
    chosen = config.get("compile")
    if chosen is False or (chosen is None and not uses_gpu(config)):
        return False
    lacking = compiling.missing(on_gpu=uses_gpu(config))
    if lacking and chosen:
        raise UserError(f"compile: {lacking} is missing; install it, or set compile=false")
    if lacking and is_rank_zero():
        print(f"not compiled: {lacking} is missing; set compile=false to hide this line", flush=True)
    return lacking is None


def build_trainer(config: Config, folder: Path, **injected: Any) -> L.Trainer:
    """Builds Lightning's trainer, which saves and loads through vlm.checkpoint."""
    node = dict(config["trainer"])
    if node["accelerator"] in ("gpu", "cuda") and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise UserError("trainer.accelerator: torch finds no usable GPU (see vlm doctor); set trainer=cpu")
    if node.get("precision") is None:
        node["precision"] = "bf16-mixed" if has_bfloat16("cuda" if uses_gpu(config) else "cpu") else "32-true"
    node |= {"enable_checkpointing": False, "enable_model_summary": False, "use_distributed_sampler": False}
    trainer = build(node, "trainer", default_root_dir=str(folder), plugins=[VerifiedIO()], **injected)
    leave_signals_to_us(trainer)
    use_launcher(trainer, Launcher)
    return trainer


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
