"""Folders of runs: creation, locks, leftovers of killed processes, and requeued SLURM jobs."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import yaml

from vlm.checkpoint.stored import freeze, interpolated
from vlm.config.tree import Config, resolve
from vlm.errors import UserError
from vlm.io.files import remove_unfinished
from vlm.training.config.overrides import differences

JOB = "slurm_job"  # file in a run's folder with the id of the job that began it


def mark(folder: Path) -> None:
    """Writes down which job a new run belongs to."""
    if job := os.environ.get("SLURM_JOB_ID"):
        (folder / JOB).write_text(f"{job}\n", encoding="utf-8")


def begun(config: dict[str, Any], label: str = "") -> Path | None:
    """The run that this job began before it was requeued, the newest if there are several; None if there is none.

    Args:
        label: Suffix of its folder's name, for a job of a sweep.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job or int(os.environ.get("SLURM_RESTART_COUNT") or 0) < 1:
        return None
    marks = sorted((Path(config["runs"]) / config["name"]).glob(f"*{label}/{JOB}"))
    own = [mark.parent for mark in marks if mark.is_file() and mark.read_text(encoding="utf-8").strip() == job]
    saved = [folder for folder in own if any((folder / "checkpoints").glob("*.ckpt"))]
    return saved[-1] if saved else None


def requeue() -> str:
    """Requeues this job; returns a message."""
    job = os.environ["SLURM_JOB_ID"]
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as fault:
        return f"job {job} could not be requeued: {fault}"
    if done.returncode:
        return f"job {job} could not be requeued: {done.stderr.strip() or done.stdout.strip()}"
    return f"job {job} is requeued and will go on from there"


CONFIG = "config.yaml"

_locks: dict[Path, IO[str]] = {}  # open config files of runs, which hold the locks
_empty: dict[Path, list[Path]] = {}  # folders of runs that have not begun, each with all folders that were created


def new_folder(config: dict[str, Any], label: str = "") -> Path:
    """Creates the empty folder of a new run, runs/NAME/DATE_TIME, unique among runs that start at the same time.

    Args:
        label: Suffix of its name, for a job of a sweep.
    Raises:
        UserError: It cannot be created.
    """
    time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    place = Path(config["runs"]) / config["name"]
    folder = place / (f"{time}_{label}" if label else time)
    with _creating(folder):
        parents = [path for path in folder.parents if not path.exists()]
        folder.parent.mkdir(parents=True, exist_ok=True)
        while not _created(folder):
            time += "_"
            folder = place / (f"{time}_{label}" if label else time)
    _empty[folder] = [folder, *parents]
    return folder


def _created(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


@contextmanager
def _creating(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        place = fault.filename or folder
        raise UserError(
            f"{place}: cannot be created ({fault.strerror}); choose another place: runs=DIR, name=NAME", 1
        ) from fault


def create(folder: Path, tree: dict[str, Any]) -> None:
    """Writes the config of a new run, with its interpolations, into its folder, and locks the run.

    Raises:
        UserError: It cannot be written.
    """
    with _creating(folder):
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        (folder / CONFIG).write_text(text, encoding="utf-8")
    _empty.pop(folder, None)
    lock(folder)


def lock(folder: Path) -> None:
    """Keeps other processes from resuming a run for as long as this one lives.

    Raises:
        UserError: Another process holds the lock, or the folder cannot be written to.
    """
    if folder.resolve() in _locks or not (folder / CONFIG).is_file():
        return
    try:
        file = (folder / CONFIG).open("r+", encoding="utf-8")
    except OSError as fault:
        raise UserError(f"{folder}: cannot be written to ({fault.strerror}); change its permissions", 1) from fault
    try:
        # A loader's workers, which may outlive a killed run, do not inherit this kind of lock.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as fault:
        raise UserError(f"{folder}: the run is going on in another process; wait for its end, or stop it") from fault
    except OSError:
        pass  # a file system without locks
    _locks[folder.resolve()] = file


def leave() -> None:
    """Unlocks the runs of this process, and removes the folders of those that did not begin."""
    while _locks:
        _locks.popitem()[1].close()
    while _empty:
        with suppress(OSError):  # another process uses it
            for folder in _empty.popitem()[1]:
                folder.rmdir()


def check_same_run(folder: Path, config: Config) -> None:
    """Checks that a folder's config is that of the checkpoint, so that a run continues in its own folder.

    Args:
        config: The checkpoint's.
    Raises:
        UserError: It names the first key that differs, with both values.
    """
    from vlm.checkpoint.rebuild import check_content

    path = folder / CONFIG
    if folder.resolve() in _locks:  # already compared; closing the file again would unlock it
        return
    if not path.is_file():
        raise UserError(
            f"{folder}: is not a run's folder: it has no {CONFIG}; resume a checkpoint where its run left it"
        )
    try:
        own = yaml.safe_load(path.read_text(encoding="utf-8"))
        check_content(own)
        own = resolve(interpolated(freeze(own)))
    except (OSError, yaml.YAMLError, RecursionError, ValueError, UserError) as fault:
        raise UserError(f"{path}: is damaged; restore it, or write the checkpoint's config there (vlm info)") from fault
    for key, (here, there) in differences(own, freeze(config)).items():
        raise UserError(
            f"{folder}: is the folder of another run, with {key}={here}; the checkpoint's has {key}={there}. "
            "Resume it in its own folder"
        )


def clean(folder: Path) -> None:
    """Removes partial files of a killed process."""
    for place in (folder, folder / "checkpoints"):
        remove_unfinished(place)
