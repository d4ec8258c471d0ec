"""The nodes of a config that are built, without keys that exist only to be referred to."""

from collections.abc import Mapping
from typing import Any

from vlm.config.build import takes
from vlm.config.target import SignatureLookup, signature
from vlm.errors import UserError

DATA = "vlm.training.data_module.Data"
# Groups under `model` that other keys refer to; the model's class does not take them.
BESIDE = ("size", "position", "projector", "fusion", "adapt")


def data_node(config: dict[str, Any], look_up: SignatureLookup = signature) -> dict[str, Any]:
    """The node of the data module, with the keys under `data` that it takes; others exist only to be referred to."""
    taken = look_up(DATA)
    return {
        "_target_": DATA,
        **{name: value for name, value in config["data"].items() if taken is None or name in taken.arguments},
    }


def model_node(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the model's node, without the keys in BESIDE and without `init_from` at any depth."""
    return _built({name: value for name, value in config["model"].items() if name not in BESIDE})


def _built(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _built(child) for name, child in value.items() if name != "init_from"}
    return value


def inject(value: Any, injected: Mapping[str, Any]) -> Any:
    """Adds values to a node, and to all nodes below it, whose class takes arguments of these names."""
    if isinstance(value, list):
        return [inject(child, injected) for child in value]
    if not isinstance(value, dict):
        return value
    filled = {key: inject(child, injected) for key, child in value.items()}
    return filled | ({name: injected[name] for name in injected if takes(value, name)} if "_target_" in value else {})


def check_fit(config: dict[str, Any], source: type | None = None, look_up: SignatureLookup = signature) -> None:
    """Checks that the records of a source have what the task reads.

    Args:
        source: Source to check instead of the config's.
        look_up: Returns the signatures of the source and the fields; those that it does not know are not checked.
    Raises:
        UserError: They lack a value; the message names the source and the task.
    """
    kinds = [look_up(node["_target_"]) for node in (config["data"]["source"], *config["task"]["fields"].values())]
    read: Any = source or (kinds[0] and kinds[0].kind)
    holds: Any = getattr(read, "holds", None)
    needed: list[Any] = [getattr(known and known.kind, "needs", None) for known in kinds[1:]]
    if holds is None or None in needed:
        return
    needs = sorted({name for names in needed for name in names})
    if lacking := [name for name in needs if name not in holds]:
        raise UserError(
            f"data: records of {read.__name__} hold {' and '.join(holds)}, while task={config['task_name']} "
            f"reads {' and '.join(lacking)}; choose other data, or another task"
        )
