"""The command that starts a training, as the user of this process has it."""

import shlex
import sys
from pathlib import Path


def train_command(*arguments: str) -> str:
    """A command line as a shell takes it: `vlm train` where this process was started as `vlm`."""
    started = "vlm train" if Path(sys.argv[0]).stem == "vlm" else "python train.py"
    return " ".join([started, *map(shlex.quote, arguments)])
