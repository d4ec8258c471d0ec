"""The command that starts a training, as this process was started."""

import sys
from pathlib import Path

from vlm.io.shell import shell_line


def train_command(*arguments: str) -> str:
    """A quoted shell command: `python train.py` if that was called or exists here, else `vlm train`."""
    called = Path(sys.argv[0])
    script = called if called.name == "train.py" else Path("train.py")
    started = ["vlm", "train"] if called.stem == "vlm" or not script.is_file() else ["python", str(script)]
    return shell_line([*started, *arguments])
