"""Jobs of SLURM that are put back into the queue: `#SBATCH --requeue --signal=USR1@90` and one `srun` line.

SLURM restarts a requeued job's script with the same command, which finds the run that the job began and resumes it.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

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
