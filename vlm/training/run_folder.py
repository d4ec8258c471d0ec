"""A run's folder: new or used by nobody else, and cleaned of what a killed process left."""

import fcntl
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import yaml

from vlm.atomic import remove_unfinished
from vlm.config.stored import freeze
from vlm.errors import UserError

CONFIG = "config.yaml"
MAY_DIFFER = ("trainer", "logger", "callbacks")  # what a resumed run may have changed since its config was written

_claims: dict[Path, IO[str]] = {}  # open for as long as this process lives


def new_folder(config: dict[str, Any]) -> Path:
    """A path that is not taken, runs/NAME/DATE_TIME; nothing is created."""
    folder = Path(config["runs"]) / config["name"] / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    while folder.exists():
        folder = folder.with_name(f"{folder.name}_")
    return folder


def create(folder: Path, config: dict[str, Any]) -> None:
    """Makes the folder of a new run with its config in it, and claims it.

    Raises:
        UserError: It cannot be made, or another run has taken it in the meantime.
    """
    try:
        folder.mkdir(parents=True)
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        (folder / CONFIG).write_text(text, encoding="utf-8")
    except FileExistsError as fault:
        raise UserError(f"{folder}: another run was started there in the same second; start again", 1) from fault
    except OSError as fault:
        raise UserError(f"{folder}: cannot be created ({fault.strerror}); choose another place: runs=DIR", 1) from fault
    claim(folder)


def claim(folder: Path) -> None:
    """Keeps other processes from resuming a run for as long as this one lives.

    Raises:
        UserError: A living process has it.
    """
    if folder.resolve() in _claims or not (folder / CONFIG).is_file():
        return
    try:
        file = (folder / CONFIG).open("r+", encoding="utf-8")
    except OSError as fault:
        raise UserError(f"{folder}: cannot be written to ({fault.strerror}); change its permissions", 1) from fault
    try:
        # Of the kinds of lock, this one is not inherited by a loader's workers, which may outlive a killed run.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as fault:
        raise UserError(f"{folder}: the run is going on in another process; wait for its end, or stop it") from fault
    except OSError:
        pass  # a file system without locks
    _claims[folder.resolve()] = file


def release(folder: Path | None) -> None:
    """Lets other processes have the run."""
    if folder and (file := _claims.pop(folder.resolve(), None)):
        file.close()


def check_same_run(folder: Path, config: dict[str, Any]) -> None:
    """Refuses a folder whose own config is not that of the checkpoint: a run would be continued in another's folder.

    Args:
        config: The checkpoint's.
    Raises:
        UserError: It names the first key that differs, with both values.
    """
    from vlm.checkpoint.verify import check_content

    path = folder / CONFIG
    if folder.resolve() in _claims:  # to close the file would give up the claim; it was compared before that was made
        return
    if not path.is_file():
        raise UserError(f"{folder}: is no run's folder, it has no {CONFIG}; resume a checkpoint where its run left it")
    try:
        own = yaml.safe_load(path.read_text(encoding="utf-8"))
        check_content(own)
    except (yaml.YAMLError, RecursionError, ValueError) as fault:
        raise UserError(f"{path}: is damaged; restore it, or write the checkpoint's config there (vlm info)") from fault
    for key, (here, there) in differences(freeze(own), freeze(config)).items():
        raise UserError(
            f"{folder}: is the folder of another run, with {key}={here}; the checkpoint's has {key}={there}. "
            "Resume it in its own folder"
        )


def differences(one: Any, other: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Keys that differ between two configs, less those that may, with both values."""
    if key in MAY_DIFFER or key == "data.num_workers" or one == other:
        return {}
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return {key: (one, other)}
    found: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*one, *other]):
        found |= differences(one.get(name), other.get(name), f"{key}.{name}" if key else str(name))
    return found


def clean(folder: Path) -> None:
    """Removes what a process left that was killed while it wrote."""
    for place in (folder, folder / "checkpoints"):
        remove_unfinished(place)


def run_folders(runs: Path) -> list[Path]:
    """The runs with checkpoints in a folder of runs, or of runs of one name, the one that saved last first."""
    found = [*runs.glob("*/*/checkpoints/*.ckpt"), *runs.glob("*/checkpoints/*.ckpt")]
    saved: dict[Path, float] = {}
    for path in found:
        folder = path.parent.parent
        saved[folder] = max(saved.get(folder, 0.0), path.stat().st_mtime)
    return sorted(saved, key=lambda folder: saved[folder], reverse=True)
