"""Nodes of a config as they are built, without keys that exist only to be interpolated."""

from collections.abc import Mapping
from typing import Any

from vlm.config.build import takes_argument
from vlm.config.target import SignatureLookup, signature
from vlm.errors import UserError

DATA = "vlm.training.data_module.Data"
# Groups under `model` that exist to be interpolated; the model's class does not take them.
REFERENCE_KEYS = ("size", "position", "projector", "fusion", "adapt")


def data_node(config: dict[str, Any], look_up: SignatureLookup = signature) -> dict[str, Any]:
    """Returns the node of the data module, with only the keys under `data` that its class takes."""
    signature_of_data = look_up(DATA)
    values = {
        name: value
        for name, value in config["data"].items()
        if signature_of_data is None or name in signature_of_data.arguments
    }
    return {"_target_": DATA, **values}


def model_node(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the model's node, without the keys in REFERENCE_KEYS and without `init_from` at any depth."""
    return _without_init_from({name: value for name, value in config["model"].items() if name not in REFERENCE_KEYS})


def _without_init_from(value: Any) -> Any:
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


def check_fit(config: dict[str, Any], source: type | None = None, look_up: SignatureLookup = signature) -> None:
    """Checks that the records of a source hold every value that the task reads.

    Args:
        source: Source to check instead of the config's.
        look_up: Returns the signatures of the source and the fields; unknown ones are not checked.
    Raises:
        UserError: They lack a value; the message names the source and the task.
    """
    kinds = [look_up(node["_target_"]) for node in (config["data"]["source"], *config["task"]["fields"].values())]
    read: Any = source or (kinds[0] and kinds[0].kind)
    holds: Any = getattr(read, "holds", None)
    needed: list[Any] = [getattr(field and field.kind, "needs", None) for field in kinds[1:]]
    if holds is None or None in needed:
        return
    needs = sorted({name for names in needed for name in names})
    if lacking := [name for name in needs if name not in holds]:
        raise UserError(
            f"data: records of {read.__name__} hold {' and '.join(holds)}, while task={config['task_name']} "
            f"reads {' and '.join(lacking)}; choose another data set or task"
        )
