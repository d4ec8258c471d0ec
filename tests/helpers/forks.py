"""Commands one after another, each in a process of its own: `python forks.py JSON`, which holds the words of each.

They are forks of one process that has imported what takes seconds, and end as any process of Python does. What each
wrote to stderr is followed by a line with its status.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any


def ends(stderr: str) -> list[tuple[int, str]]:
    """Of each command: its exit status, or minus the signal that killed it, and what it wrote to stderr."""
    parts = re.split(r"^status (-?\d+)\n", stderr, flags=re.MULTILINE)
    return [(int(status), said) for said, status in zip(parts[::2], parts[1::2], strict=False)]


def run(commands: list[list[str]], **options: Any) -> list[tuple[int, str]]:
    """Runs commands, with options of `subprocess.run`; how each ended."""
    program = [sys.executable, __file__, json.dumps(commands)]
    return ends(subprocess.run(program, stderr=subprocess.PIPE, text=True, **options).stderr)


def start(words: list[str]) -> None:
    """What `python` does with the words of a command: a script, or `-m` and a module, with arguments."""
    sys.path[0] = os.getcwd() if words[0] == "-m" else str(Path(words[0]).parent)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    import vlm.tasks.captioning.predict  # noqa: F401  with torch, and without what cleans up at its end

    for command in json.loads(sys.argv[1]):
        if os.fork() == 0:
            start(command)
        print("status", os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)
