"""What the config of a checkpoint may ask for, whoever wrote it, where a run is resumed or a model evaluated."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm.config import target
from vlm.errors import UserError

GROUPS = ("data", "model", "task", "optim", "schedule", "trainer", "callbacks", "logger")
# Of Lightning, what neither writes outside of the run's folder nor reaches the network.
_LIGHTNING = {
    "lightning.Trainer": "",
    "lightning.pytorch.callbacks.": "DeviceStatsMonitor EarlyStopping LearningRateMonitor ModelSummary "
    "RichModelSummary RichProgressBar StochasticWeightAveraging TQDMProgressBar Timer",
    "lightning.pytorch.loggers.": "TensorBoardLogger",
    "lightning.pytorch.strategies.": "DDPStrategy ModelParallelStrategy SingleDeviceStrategy",
}
_ALLOWED = {head + name for head, names in _LIGHTNING.items() for name in names.split() or [""]}
# Of data sources: what lets them reach a network or write, and the variable by which a user allows it.
_NOT_ITS_OWN = {"download": "", "remote": "VLM_REMOTE", "write_index": ""}
# Arguments that say where something is written; the program fills them in.
_PLACES = {"default_root_dir", "dir", "dirpath", "filename", "folder", "log_dir", "plugins", "root_dir", "save_dir"}


def check_stored(config: Any) -> None:
    """Refuses a checkpoint's config that could do more than a run of vlm does.

    Raises:
        UserError: It is no config, or it names a class or a place that only its user may choose.
    """
    kinds = {"seed": int, "name": str, "runs": str, "task_name": str} | dict.fromkeys(GROUPS, dict)
    wrong = [
        key for key, kind in kinds.items() if not isinstance(config, dict) or not isinstance(config.get(key), kind)
    ]
    if wrong:
        raise UserError(f"the checkpoint's config is none of vlm ({', '.join(wrong)}); use another checkpoint")
    faults = list(_faults(config, ""))
    if faults:
        raise UserError(
            f"the checkpoint's config is refused, for anybody may have written it:\n{'; '.join(faults[:5])}"
        )


def contained(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A checkpoint's config that fetches nothing, and whose cache lies where the checkpoint does.

    Nor does it write beside its data. With VLM_REMOTE=1 in the environment it may read data at the URLs that it names.

    Args:
        folder: The checkpoint's run.
    """
    runs = Path(config["runs"])
    inside = folder.resolve().is_relative_to(runs.resolve())
    return {**config, "runs": str(runs if inside else folder), "data": _offline(config["data"])}


def _offline(value: Any) -> Any:
    if isinstance(value, dict):
        off = {key for key, allowed in _NOT_ITS_OWN.items() if os.environ.get(allowed) != "1"}
        return {key: key not in off and _offline(child) for key, child in value.items()}
    return [_offline(child) for child in value] if isinstance(value, list) else value


def _faults(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return
    for key, child in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key == "_target_" and not _harmless(child):
            yield f"{where}: {str(child)[:100]} is not built for a checkpoint"
        elif key in _PLACES and path.split(".")[0] in ("callbacks", "logger", "trainer"):
            yield f"{where}: is not the checkpoint's to choose"
        yield from _faults(child, where)


def _harmless(name: Any) -> bool:
    try:
        target.find(name)
    except UserError:
        return False
    return name in _ALLOWED or not name.startswith("lightning.")
