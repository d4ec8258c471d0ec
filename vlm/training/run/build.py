"""Builds the parts of a run from its config: data, model, task, optimisation and trainer."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from vlm.checkpoint.rebuild import rebuild_shapes
from vlm.config.build import build, spec
from vlm.config.target import find, signature
from vlm.config.tree import Config, Tree, escape, origin, put, resolve, select, walk
from vlm.data.fields import Field
from vlm.data.images.resize import INTERPOLATIONS
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import UserError, print_error, printable_lines
from vlm.models.pretrained.stack import Spec
from vlm.nn.device import has_bfloat16
from vlm.nn.embeddings import Spelling
from vlm.nn.image_size import sides
from vlm.randomness import key
from vlm.training.callbacks.checkpoints import VerifiedIO
from vlm.training.config.nodes import data_node, inject, model_node
from vlm.training.data_module import Data
from vlm.training.run.faults import Launcher
from vlm.training.run.processes import is_rank_zero
from vlm.training.step import blocks as compiling
from vlm.training.step.lightning_private import leave_signals_to_us, replace_loops, use_launcher
from vlm.training.step.optim import Optimization
from vlm.training.step.task import Task

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
        lr_factors=config.get("lr_factors") or {},
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
    replace_loops(trainer)
    leave_signals_to_us(trainer)
    use_launcher(trainer, Launcher)
    return trainer
