"""Nodes of a config as they are built, without keys that exist only to be interpolated."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from vlm.config.build import takes_argument
from vlm.config.compose import conf_dir
from vlm.config.target import SignatureLookup, signature
from vlm.config.tree import Config, Tree, Value
from vlm.errors import UserError

DATA = "vlm.training.data_module.Data"
MAX_OPTIONS = 3  # options of a group that a message names
# Options for a user's own files, which a message names before those of published and generated data.
OWN_DATA: tuple[str, ...] = ("captions", "image_folder", "image_table", "questions", "conversations", "text", "texts")
OWN_DATA += ("text_folder", "translations", "aligned", "squad", "conll")
# Groups under `model` that exist to be interpolated; the model's class does not take them.
REFERENCE_KEYS = ("size", "position", "projector", "fusion", "adapt")


def data_node(config: Config, look_up: SignatureLookup = signature) -> Tree:
    """Returns the node of the data module, with only the keys under `data` that its class takes."""
    signature_of_data = look_up(DATA)
    values = {
        name: value
        for name, value in config["data"].items()
        if signature_of_data is None or name in signature_of_data.arguments
    }
    return {"_target_": DATA, **values}


def model_node(config: Config) -> Tree:
    """Returns the model's node, without the keys in REFERENCE_KEYS and without `init_from` at any depth."""
    node = {name: value for name, value in config["model"].items() if name not in REFERENCE_KEYS}
    return cast(Tree, _without_init_from(node))


def _without_init_from(value: Value) -> Value:
    if isinstance(value, dict):
        return {name: _without_init_from(child) for name, child in value.items() if name != "init_from"}
    return value


def inject(value: Any, injected: Mapping[str, Any]) -> Any:
    """Adds values to a node, and to all nodes below it, whose class takes arguments of these names."""
    if isinstance(value, list):
        return [inject(child, injected) for child in value]
    if not isinstance(value, dict):
        return value
    filled = {key: inject(child, injected) for key, child in value.items()}
    return filled | (
        {name: injected[name] for name in injected if takes_argument(value, name)} if "_target_" in value else {}
    )


def check_fit(config: Config, source: type | None = None, look_up: SignatureLookup = signature) -> None:
    """Checks that the records of a source hold every value that the task reads.

    Args:
        source: Source to check instead of the config's.
        look_up: Returns the signatures of the source and the fields; unknown ones are not checked.
    Raises:
        UserError: They lack a value; the message names the source and the task.
    """
    targets = [config["data"]["source"]["_target_"], *_field_targets(config["task"])]
    own, *fields = (_read_kind(target, look_up) for target in targets)
    own = source or own
    holds, needs = getattr(own, "holds", None), _needs(fields)
    if holds is None or needs is None:
        return
    if lacking := sorted(needs - set(holds)):
        raise UserError(
            f"data: records of {own.__name__} hold {' and '.join(holds)}, while task={config['task_name']} "
            f"reads {' and '.join(lacking)}; choose {_fitting_options(fields, own, look_up)}"
        )


def _read_kind(target: str, look_up: SignatureLookup) -> Any:
    """Returns the class of a target; None if its signature is unknown."""
    known = look_up(target)
    return None if known is None else known.kind


def _field_targets(task: Mapping[str, Any]) -> list[str]:
    return [node["_target_"] for node in task["fields"].values()]


def _needs(fields: Sequence[Any]) -> set[str] | None:
    """Returns the values that fields read; None if that of one is unknown."""
    needs: list[Any] = [getattr(field, "needs", None) for field in fields]
    return None if None in needs else {name for names in needs for name in names}


def _fitting_options(fields: Sequence[Any], source: Any, look_up: SignatureLookup) -> str:
    """Names the options of data that hold what a task's fields read, and the tasks that a source fits."""

    def fits(needed: Sequence[Any], kind: Any) -> bool:
        refuses_turns = getattr(kind, "has_turns", False) and any(
            getattr(field, "turns", True) is False for field in needed
        )
        needs = _needs(needed)
        return needs is not None and needs <= set(getattr(kind, "holds", ())) and not refuses_turns

    sources = {name: node["source"]["_target_"] for name, node in _shipped_options("data")}
    data = [name for name, target in sources.items() if fits(fields, _read_kind(target, look_up))]
    data.sort(key=lambda name: OWN_DATA.index(name) if name in OWN_DATA else len(OWN_DATA))
    tasks = [
        name
        for name, node in _shipped_options("task")
        if fits([_read_kind(target, look_up) for target in _field_targets(node["task"])], source)
    ]
    groups = {"data": data, "task": tasks}
    chosen = [
        " or ".join(f"{group}={name}" for name in names[:MAX_OPTIONS]) for group, names in groups.items() if names
    ]
    return ", or ".join(chosen) or "another data set or task"


def _shipped_options(group: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each option of a group and its keys; of inherited ones, only a source and a task's fields."""

    def read(path: Path) -> dict[str, Any]:
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
        for name in (name for name in node.get("defaults", []) if isinstance(name, str) and name != "_self_"):
            base = read(path.parent / f"{name.removesuffix('@_here_')}.yaml")
            node["source"] = {**base.get("source", {}), **node.get("source", {})}
            if "task" in base:
                fields = {**base["task"]["fields"], **node.get("task", {}).get("fields", {})}
                node["task"] = {**base["task"], **node.get("task", {}), "fields": fields}
        return node

    return ((path.stem, read(path)) for path in sorted((conf_dir() / group).glob("*.yaml")))
