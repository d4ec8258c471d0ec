"""Time of ten typical mistakes from Enter to message, on an idle machine: a table of wall clock and CPU.

    python benchmarks/first_mistakes.py [REPEATS]

Each command runs in a new process, in an empty folder with one photo; the fastest of the repeats counts (default: 3).
The exit status is 1 if a message takes longer than LIMIT, or a command does not fail with the expected message.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from PIL import Image

LIMIT = 1.5  # seconds of wall clock
CHECKPOINT = Path(__file__).resolve().parents[1] / "data" / "sample" / "captioner.ckpt"
MISTAKES = {  # the command line, and what its message says
    "train optim.lrr=1": "did you mean lr?",
    "train data=captions": "data.root: missing",
    "train model.encoder.num_heads=5": "does not divide dim",
    "train task=classification data=captions": "reads label",
    "caption photo.jpg --beems 3": "No such option '--beems'",
    "caption photo.jpg -c nosuch": "nosuch: no such checkpoint",
    f"caption nosuch.jpg -c {CHECKPOINT}": "nosuch.jpg: No such file",
    "bench optim.lrr=1": "did you mean lr?",
    "train resume=nosuch": "resume=nosuch: no such run",
    "train trainer.devices=9": "is not divisible by 9 devices",
}


class Timing(NamedTuple):
    """Seconds from the start of a process to its end."""

    wall: float
    cpu: float


def time_command(command: str, message: str, folder: str) -> Timing:
    """Runs a command of vlm that fails; returns its time.

    Raises:
        SystemExit: It succeeds, or prints something else.
    """
    program = [sys.executable, "-c", "from vlm.cli.main import main; main()", *command.split()]
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, os.times()
    if not done.returncode or message not in done.stderr:
        raise SystemExit(
            f"vlm {command}: expected a message with {message!r}, got status {done.returncode}:\n{done.stderr}"
        )
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Timing(wall, cpu)


def main(repeats: int = 3) -> int:
    """Prints the table; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="first-mistakes-") as folder:
        Image.new("RGB", (32, 32)).save(Path(folder) / "photo.jpg")
        print("| mistake | wall clock, s | CPU, s |\n|---|---|---|")
        slow = 0
        for command, message in MISTAKES.items():
            best = min(time_command(command, message, folder) for _ in range(repeats))
            slow += best.wall > LIMIT
            print(f"| `vlm {command.replace(str(CHECKPOINT), CHECKPOINT.name)}` | {best.wall:.2f} | {best.cpu:.2f} |")
    print(f"\n{len(MISTAKES) - slow} of {len(MISTAKES)} within {LIMIT} s (best of {repeats})")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
