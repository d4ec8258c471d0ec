"""Checks of a config before training reads or writes anything."""

from collections.abc import Iterator
from typing import Annotated, Any

from vlm.config.build import check as check_nodes
from vlm.config.build import product, quick_signature
from vlm.config.signatures import read_signature
from vlm.config.target import SignatureLookup, find, find_function, limit, signature
from vlm.config.tree import Config, Tree, Value, origin, origins, select, walk
from vlm.config.types import describe_mismatch, fits, show
from vlm.errors import INJECTED, Count, Limit, Range, Rate, UserError
from vlm.training.config.nodes import check_fit, data_node, model_node, short_text
from vlm.training.run.processes import batch_faults
from vlm.untrusted.sizes import out_of_bounds

Batches = Annotated[int | float | None, Range(0)]
_SUPPLIED = Annotated[Any, INJECTED]
# Types and limits for arguments of other packages' classes; classes of vlm declare their own.
LIMITS: dict[str, dict[str, Any]] = {
    "lightning.pytorch.trainer.trainer.Trainer": {
        "accumulate_grad_batches": Count,
        "callbacks": _SUPPLIED,
        "check_val_every_n_epoch": Count | None,
        "default_root_dir": _SUPPLIED,
        "devices": list[int] | str | Annotated[int, Range(1, also=-1)],
        "gradient_clip_val": Annotated[float | None, Range(0)],
        "limit_test_batches": Batches,
        "limit_train_batches": Annotated[int | float | None, Range(above=0)],
        "limit_val_batches": Batches,
        "log_every_n_steps": Annotated[int | None, Range(1)],
        "logger": _SUPPLIED,
        "max_epochs": Annotated[int | None, Range(1, also=-1)],
        "max_steps": Annotated[int, Range(1, also=-1)],
        "num_nodes": Count,
        "num_sanity_val_steps": Annotated[int | None, Range(0, also=-1)],
        "plugins": _SUPPLIED,
        "val_check_interval": Annotated[int | float | str | None, Range(above=0)],
    },
    "lightning.pytorch.loggers.tensorboard.TensorBoardLogger": {"save_dir": _SUPPLIED},
    "torch.optim.": {
        "betas": tuple[Rate, Rate],
        "dampening": Rate,
        "eps": Annotated[float, Range(0)],
        "lr": Annotated[float, Range(0)],
        "momentum": Rate,
        "params": _SUPPLIED,
        "weight_decay": Annotated[float, Range(0)],
    },
}
limit(LIMITS)

REQUIRED_NODES = ("model", "optim", "schedule", "trainer", "task")  # groups with a node that every run builds
REWARD_ARGUMENTS = ("texts", "references", "prompts", "ids")  # of a user's function in task.reward
# Arguments that the program supplies, which classes of other packages need not mark as such.
SUPPLIED_ARGUMENTS = {"model": ("vocab_size", "num_classes"), "task": ("model", "fields", "seed", "optimization")}


class FolderName(Limit):
    """The name of a single folder, without a path."""

    def holds(self, value: Value) -> bool:
        return not isinstance(value, str) or (value.strip() not in ("", ".", "..") and not set(value) & set("/\\\0"))

    def __str__(self) -> str:
        return "the name of a folder, without /"


TYPES = {
    "seed": Annotated[int, Range(0)],
    "name": Annotated[str, FolderName()],
    "runs": str,
    "resume": str | None,
    "trust": str | None,
    "test": bool,
    "layer_decay": Annotated[float, Range(above=0)],
    "lr_factors": dict[str, Annotated[float, Range(above=0)]] | None,  # None in older runs
    "schedule_steps": Annotated[int, Range(1)] | None,
    "compile": bool | None,
    "activation_checkpointing": bool | None,  # None in older runs
}


def check(config: Config, *, resolved: bool = True, imports: bool = True) -> None:
    """Reports every fault of a config at once, before anything is read or written.

    Signatures are read from source files first, because importing torch and Lightning takes seconds. Arguments that the
    files do not determine are checked against the imported classes.

    Args:
        resolved: False if the config's interpolations could not be resolved: then only data and models for another task
            are reported.
        imports: False to report only what source files say, because the config has other faults already.
    """
    if not resolved:
        return _check(config, quick_signature, resolved=False)
    _check(config, read_signature)
    if imports:
        _raise_faults(source_faults(config, quick_signature))
        _check(config, signature)


def _check(config: Config, look_up: SignatureLookup, *, resolved: bool = True) -> None:
    _raise_faults(missing_groups(config))
    _raise_faults(node_faults(config))
    if not resolved:
        _raise_faults(model_faults(config, look_up))
        return check_fit(config, look_up=look_up)
    nodes: Tree = {"data": data_node(config, look_up), "model": model_node(config)}
    nodes |= {"model.adapt": adapt} if (adapt := config["model"].get("adapt")) else {}
    check_nodes({**config, **nodes}, config.tree, types=TYPES, injected=SUPPLIED_ARGUMENTS, look_up=look_up)
    accumulates = (config["trainer"].get("accumulate_grad_batches") or 1) != 1
    calls_methods = accumulates or config["data"].get("cache_features") or config["task"].get("reward") is not None
    if look_up is read_signature and calls_methods:  # only imported classes have them
        return
    faults = [
        *out_of_bounds(config),
        *size_faults(nodes, ""),
        *patch_faults(config),
        *augment_faults(config),
        *(
            f"{key}: {describe_mismatch(value, str | None)}"
            for key, value in walk(config["model"], "model")
            if key.endswith(".init_from") and not fits(value, str | None)
        ),
        *device_faults(config),
        *model_faults(config, look_up),
    ]
    if config["data"].get("cache_features"):
        from vlm.training.image_cache import feature_faults  # imports torch

        faults += feature_faults(config)
    faults += accumulation_faults(config)
    if config["task"].get("reward") is not None:
        from vlm.training.run.build import find_init_paths  # imports torch

        if not find_init_paths(config):
            what = "task.reward: needs a trained model, whose sampled texts are rewarded"
            faults.append(f"{what}; set model.init_from=RUN")
        faults += reward_faults(config["task"]["reward"])
    _raise_faults(origins(config.tree, faults))
    check_fit(config, look_up=look_up)


def _raise_faults(faults: list[str]) -> None:
    if faults:
        raise UserError("\n".join(faults))


def missing_groups(config: Config) -> list[str]:
    """Returns an error for each required group that an override such as trainer=[] removed."""
    missing = [name for name in ("data", "logger", "callbacks") if name not in config]
    for name in REQUIRED_NODES:  # another group may set a key of it
        node = config.get(name)
        if node is None or (isinstance(node, dict) and "_target_" not in node):
            missing.append(name)
    return [f"{name}: is required; leave out {name}=[]" for name in missing]


def node_faults(config: Config) -> list[str]:
    """Returns an error for each field, callback or logger that is not a node; callbacks and loggers may be null."""
    if isinstance(teacher := config["task"].get("teacher"), str):
        return [f"task.teacher: {short_text(teacher)} is not a group of options; set task.teacher.path={teacher}"]
    parts = {"task.fields": config["task"].get("fields"), "callbacks": config["callbacks"], "logger": config["logger"]}
    fault = "has no class to build; give it a _target_"
    faults = [
        f"{key}: {short_text(nodes)} {fault}" for key, nodes in parts.items() if nodes and not isinstance(nodes, dict)
    ]
    return faults or [
        f"{key}.{name}: {short_text(node)} {fault}"
        for key, nodes in parts.items()
        for name, node in (nodes or {}).items()
        if not (isinstance(node, dict) and "_target_" in node) and (node is not None or key == "task.fields")
    ]


def reward_faults(reward: Value) -> list[str]:
    """Returns an error for each reward that is a function of the user and cannot be called."""
    faults = []
    for name in (name for name in (reward if isinstance(reward, dict) else [reward]) if "." in str(name)):
        try:
            find_function(str(name), REWARD_ARGUMENTS)
        except UserError as error:
            faults.append(f"task.reward: {error}")
    return faults


def device_faults(config: Config) -> list[str]:
    """Returns an error if the devices cannot share a batch equally; "auto" is checked when training starts."""
    trainer, size = config["trainer"], config["data"]["batch_size"]
    devices = trainer.get("devices")
    count = len(devices) if isinstance(devices, list) else devices if isinstance(devices, int) else 0
    return batch_faults(size, count * (trainer.get("num_nodes") or 1))


def model_faults(config: Config, look_up: SignatureLookup) -> list[str]:
    """Returns an error if the task cannot train this type of model."""
    model, task = product(config["model"], look_up), look_up(config["task"]["_target_"])
    wanted = task.parameters.get("model") if task else None
    if wanted is None or fits(model, wanted.annotation):
        return []
    what = f"model: {model} does not fit task={config['task_name']}, which needs a {show(wanted.annotation)}"
    return [f"{what}; choose another model, or leave it out to use the task's default model"]


def source_faults(config: Config, look_up: SignatureLookup) -> list[str]:
    """Returns an error if the data's source needs one of several arguments and none is set."""
    node = config["data"]["source"]
    source = look_up(node["_target_"])
    names = getattr(source.kind, "needs_one_of", ()) if source else ()
    if not names or any(node.get(name) is not None for name in names):
        return []
    first, *alternatives = (origin(config.tree, f"data.source.{name}") for name in names)
    return [f"{first}: missing, and so is {' and '.join(alternatives)}; give a folder or a table of images"]


def accumulation_faults(config: Config) -> list[str]:
    """Returns an error if batches are accumulated although a loss compares the samples of a batch."""
    count = config["trainer"].get("accumulate_grad_batches") or 1
    if count == 1:
        return []
    task: Any = find(config["task"]["_target_"])
    if not task.compares_samples(config["task"]):
        return []
    what = f"trainer.accumulate_grad_batches: {count} batches do not compare their samples as one large batch does"
    return [f"{what}, which task={config['task_name']} needs; set it to 1 (data.batch_size and devices may grow)"]


def patch_faults(config: Config) -> list[str]:
    """Returns an error if images are smaller than a patch of the model."""
    size = select(config, "data.preprocess.image_size")
    patches = {key: value for key, value in walk(config["model"], "model") if key.endswith(".patch_size")}
    smallest = min(list_integers(size), default=None)
    return [
        f"data.preprocess.image_size: {size} is smaller than {key}, {patch}; change one of them"
        for key, patch in patches.items()
        if smallest is not None and isinstance(patch, int) and smallest < patch
    ]


def augment_faults(config: Config) -> list[str]:
    """Returns an error if images are augmented that are cut into squares or become tokens of a codebook."""
    augmented = [field for field in config["task"]["fields"].values() if field.get("augment")]
    what = "data.augment: is not supported for images that"
    if any((field.get("preprocess") or {}).get("tiles") for field in augmented):
        return [f"{what} are cut into squares; set it to null, or data.preprocess.tiles to false"]
    if any(field["_target_"].endswith(".ImageTokenField") for field in augmented):
        return [f"{what} become tokens; set it to null"]
    return []


def list_integers(size: Value) -> list[int]:
    """Returns the integers in a size: a number, or a list such as height and width; empty for anything else."""
    return [side for side in (size if isinstance(size, list | tuple) else [size]) if isinstance(side, int)]


def size_faults(value: Value, path: str) -> Iterator[str]:
    """Yields a line for each size that does not fit another, such as heads that do not divide the width."""
    if not isinstance(value, dict):
        return
    positions = value.get("positions")
    dim, heads, head_dim = (value.get(name) for name in ("dim", "num_heads", "head_dim"))
    if head_dim is None and isinstance(dim, int) and isinstance(heads, int) and heads and dim % heads == 0:
        head_dim = dim // heads
    for name, size in (("dim", dim), ("num_heads", heads), ("head_dim", head_dim)):
        stated = positions.get(name) if isinstance(positions, dict) else None
        if isinstance(size, int) and isinstance(stated, int) and size != stated:
            shared = name == "num_heads" or (name == "head_dim" and value.get("head_dim") is None)
            remedy = "set model.size.num_heads instead, which both use" if shared else "change one of them"
            yield f"{path}positions.{name}: {stated} differs from {name}, {size}; {remedy}"
    for name, divisor_name in (("dim", "num_heads"), ("image_size", "patch_size")):
        size, divisor = value.get(name), value.get(divisor_name)
        if not isinstance(divisor, int) or (name == "dim" and value.get("head_dim")):
            continue
        if any(side % divisor for side in list_integers(size)):
            yield f"{path}{divisor_name}: {divisor} does not divide {name}, {size}; change one of them"
    for name, child in value.items():
        yield from size_faults(child, f"{path}{name}.")
