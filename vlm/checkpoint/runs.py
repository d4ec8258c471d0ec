"""Finds checkpoints of runs: `last`, and a run's folder."""

import os
from pathlib import Path

from vlm.errors import UserError

BEST = ("best.ckpt", "last.ckpt")  # in order of preference
LAST = "last"  # the newest run under RUNS
RUNS = Path("runs")


def run_folders(runs: Path) -> list[Path]:
    """Returns the runs with checkpoints in a folder of runs, or of runs of one name, the most recently saved first."""
    checkpoints = [*runs.glob("*/*/checkpoints/*.ckpt"), *runs.glob("*/checkpoints/*.ckpt")]
    saved: dict[Path, float] = {}
    for path in checkpoints:
        folder = path.parent.parent
        if path.is_file():  # not a broken link
            saved[folder] = max(saved.get(folder, 0.0), path.stat().st_mtime)
    return sorted(saved, key=lambda folder: saved[folder], reverse=True)


def newest_run() -> Path:
    """The folder of the newest run.

    Raises:
        UserError: There is no run with a checkpoint.
    """
    if folders := run_folders(RUNS):
        return folders[0]
    raise UserError(f"{LAST}: there is no run with a checkpoint under {RUNS}/; name a run's folder or a .ckpt file")


def in_run(place: str | os.PathLike[str]) -> Path:
    """The best checkpoint of a run's folder, or of the newest run for `last`; other paths are returned unchanged.

    Raises:
        UserError: There is no run, or the path cannot be accessed.
    """
    path = newest_run() if os.fspath(place) == LAST else Path(place)
    candidates = [path / folder / name for folder in ("checkpoints", "") for name in BEST]
    try:
        return next((one for one in candidates if one.is_file()), path) if path.is_dir() else path
    except OSError as fault:
        raise UserError(f"{path}: cannot be read ({fault.strerror}); give the path of a .ckpt file") from fault
