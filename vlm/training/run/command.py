"""The command that starts a training, as the user of this process has it."""

import sys
from pathlib import Path

from vlm.io.shell import shell_line


def train_command(*arguments: str) -> str:
    """A command line as a shell takes it: by the train.py that was called, or lies here; else by `vlm train`."""
    called = Path(sys.argv[0])
    script = called if called.name == "train.py" else Path("train.py")
    started = ["vlm", "train"] if called.stem == "vlm" or not script.is_file() else ["python", str(script)]
    return shell_line([*started, *arguments])
