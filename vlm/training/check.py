"""Faults of a config that training finds before it reads or writes anything."""

from collections.abc import Iterator
from typing import Annotated, Any

from vlm.config.check import check as check_nodes
from vlm.config.check import misfit
from vlm.config.compose import node
from vlm.config.links import origins
from vlm.config.target import find
from vlm.errors import Limit, Range, UserError

# Nodes that the program completes by name: a task takes its model, a model the sizes that the data decide.
COMPLETED = ("data", "model", "task")


class FolderName(Limit):
    """A name that is one folder inside of another."""

    def holds(self, value: Any) -> bool:
        return not isinstance(value, str) or (value.strip() not in ("", ".", "..") and not set(value) & set("/\\\0"))

    def __str__(self) -> str:
        return "the name of a folder, without /"


TYPES = {
    "seed": Annotated[int, Range(0)],
    "name": Annotated[str, FolderName()],
    "runs": str,
    "test": bool,
    "layer_decay": Annotated[float, Range(above=0)],
    "compile": bool | None,
    "activation_checkpointing": bool | None,  # runs of before it have none
}


def check(config: dict[str, Any]) -> None:
    """Reports every fault of a config at once, before anything is read or written."""
    from vlm.training.feature_cache import feature_faults
    from vlm.training.run import data_node

    nodes = {"data": data_node(config), "model": node(config, "model")}
    check_nodes({**config, **nodes}, config, types=TYPES, completed=COMPLETED)
    faults = [*size_faults(nodes, ""), *model_faults(config), *feature_faults(config), *accumulation_faults(config)]
    if faults:
        raise UserError("\n".join(origins(config, faults)))


def model_faults(config: dict[str, Any]) -> list[str]:
    """A line where the model is not of the kind that the task trains."""
    wrong = misfit(config["model"], config["task"], "model")
    if wrong is None:
        return []
    given, wanted = wrong
    what = f"model: {given} does not fit task={config['task_name']}, which needs a {wanted}"
    return [f"{what}; choose another model, or none, and the task brings its own"]


def accumulation_faults(config: dict[str, Any]) -> list[str]:
    """A line where batches are accumulated whose samples a loss compares with one another."""
    count = config["trainer"].get("accumulate_grad_batches") or 1
    task: Any = find(config["task"]["_target_"])
    if count == 1 or not task.compares_samples(config["task"]):
        return []
    what = f"trainer.accumulate_grad_batches: {count} batches do not compare their samples as one large batch does"
    return [f"{what}, which task={config['task_name']} needs; set it to 1 (data.batch_size and devices may grow)"]


def check_suited(config: dict[str, Any]) -> None:
    """Reports data and models that are for another task; asked where a config cannot be resolved, as it then is."""
    if found := model_faults(config):
        raise UserError("\n".join(found))
    from vlm.training.run import check_fit

    check_fit(config)


def size_faults(value: Any, path: str) -> Iterator[str]:
    """Yields a line for each size that does not divide another, such as heads that do not divide the width."""
    if not isinstance(value, dict):
        return
    for whole, part in (("dim", "num_heads"), ("image_size", "patch_size")):
        size, divisor = value.get(whole), value.get(part)
        if not isinstance(size, int) or not isinstance(divisor, int) or value.get("head_dim"):
            continue
        if size % divisor:
            yield f"{path}{part}: {divisor} does not divide {whole}, {size}; change one of them"
    for name, child in value.items():
        yield from size_faults(child, f"{path}{name}.")
