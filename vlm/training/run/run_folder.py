"""Run folders: creation, locks, and requeued SLURM jobs."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

import yaml

from vlm.checkpoint.stored import freeze, restore_interpolations
from vlm.config.tree import Config, Tree, resolve
from vlm.errors import UserError
from vlm.training.config.nodes import differences

JOB_FILE = "slurm_job"  # file in a run's folder with the id of the SLURM job that started it


def find_requeued_run(config: Config, suffix: str = "") -> Path | None:
    """Returns the newest run that this SLURM job started before it was requeued, or None.

    Args:
        suffix: Suffix of its folder's name, for a sweep job.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job or int(os.environ.get("SLURM_RESTART_COUNT") or 0) < 1:
        return None
    files = sorted((Path(config["runs"]) / config["name"]).glob(f"*{suffix}/{JOB_FILE}"))
    folders = [file.parent for file in files if file.is_file() and file.read_text(encoding="utf-8").strip() == job]
    resumable = [folder for folder in folders if any((folder / "checkpoints").glob("*.ckpt"))]
    return resumable[-1] if resumable else None


def requeue_job() -> str:
    """Requeues this SLURM job and returns a message."""
    job = os.environ["SLURM_JOB_ID"]
    try:
        process = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as fault:
        return f"job {job} could not be requeued: {fault}"
    if process.returncode:
        return f"job {job} could not be requeued: {process.stderr.strip() or process.stdout.strip()}"
    return f"job {job} is requeued and will resume from this checkpoint"


CONFIG = "config.yaml"

_lock_files: dict[Path, IO[str]] = {}  # open config files, which hold the locks of their runs
_empty_folders: dict[Path, list[Path]] = {}  # of runs that did not start yet, with all folders created for each


def create_run_folder(config: Config, suffix: str = "") -> Path:
    """Creates the empty folder runs/NAME/DATE_TIME[_SUFFIX] of a new run, unique even if runs start at the same time.

    Args:
        suffix: Suffix of the folder's name, for a sweep job.
    Raises:
        UserError: It cannot be created.
    """
    time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    parent = Path(config["runs"]) / config["name"]
    folder = parent / (f"{time}_{suffix}" if suffix else time)
    with _creation_errors(folder):
        parents = [path for path in folder.parents if not path.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                break
            except FileExistsError:
                time += "_"
                folder = parent / (f"{time}_{suffix}" if suffix else time)
    _empty_folders[folder] = [folder, *parents]
    return folder


@contextmanager
def _creation_errors(folder: Path) -> Iterator[None]:
    """Context that converts errors of creating a folder to a UserError."""
    try:
        yield
    except OSError as fault:
        path = fault.filename or folder
        raise UserError(
            f"{path}: cannot be created ({fault.strerror}); choose another folder: runs=DIR, name=NAME", 1
        ) from fault


def write_run_config(folder: Path, tree: Tree) -> None:
    """Writes a new run's config, with its interpolations, and the id of its SLURM job to its folder; locks the run.

    Raises:
        UserError: It cannot be written.
    """
    with _creation_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        (folder / CONFIG).write_text(text, encoding="utf-8")
    _empty_folders.pop(folder, None)
    lock_run(folder)
    if job := os.environ.get("SLURM_JOB_ID"):
        (folder / JOB_FILE).write_text(f"{job}\n", encoding="utf-8")


def lock_run(folder: Path) -> None:
    """Prevents other processes from resuming a run while this process lives.

    Raises:
        UserError: Another process holds the lock, or the folder is not writable.
    """
    if folder.resolve() in _lock_files or not (folder / CONFIG).is_file():
        return
    try:
        file = (folder / CONFIG).open("r+", encoding="utf-8")
    except OSError as fault:
        raise UserError(f"{folder}: is not writable ({fault.strerror}); change its permissions", 1) from fault
    try:
        # A loader's workers, which may outlive a killed run, do not inherit this kind of lock.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as fault:
        raise UserError(f"{folder}: another process is training this run; wait until it ends, or stop it") from fault
    except OSError:
        pass  # a file system without locks
    _lock_files[folder.resolve()] = file


def release_runs() -> None:
    """Unlocks the runs of this process and removes the folders of runs that did not start."""
    while _lock_files:
        _lock_files.popitem()[1].close()
    while _empty_folders:
        with suppress(OSError):  # another process uses it
            for folder in _empty_folders.popitem()[1]:
                folder.rmdir()


def check_same_run(folder: Path, config: Config) -> None:
    """Checks that a checkpoint belongs to the run in a folder, by comparing their configs.

    Args:
        config: The config in the checkpoint.
    Raises:
        UserError: The configs differ. The message names the first key that differs, with both values.
    """
    from vlm.untrusted.checkpoints import check_content

    path = folder / CONFIG
    if folder.resolve() in _lock_files:  # already compared; closing the file again would unlock it
        return
    if not path.is_file():
        raise UserError(
            f"{folder}: is not a run folder, because it has no {CONFIG}; resume a checkpoint in its original folder"
        )
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
        check_content(stored)
        stored = resolve(restore_interpolations(freeze(stored)))
    except (OSError, yaml.YAMLError, RecursionError, ValueError, UserError) as fault:
        raise UserError(f"{path}: is damaged; restore it, or write the checkpoint's config there (vlm info)") from fault
    for key, (value, expected) in differences(stored, freeze(config)).items():
        raise UserError(
            f"{folder}: belongs to another run, with {key}={value} instead of the checkpoint's {key}={expected}; "
            "resume the checkpoint in its original folder"
        )
