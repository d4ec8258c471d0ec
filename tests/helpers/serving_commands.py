"""Commands that serve, each a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiny_checkpoints import ROOT


@contextmanager
def listening(
    *arguments: str, program: tuple[str, ...] = ("-m", "vlm"), package: Path = ROOT, cwd: Path | None = None, **env: str
) -> Iterator[tuple[subprocess.Popen, int]]:
    """`vlm serve` or `vlm demo` with its port, once it listens; it is killed at the end, if it has not ended.

    Args:
        package: The folder that holds vlm.
        env: More of the environment.
    """
    command = [sys.executable, *program, *arguments, "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", **env}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, cwd=cwd
    ) as process:
        try:
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)\b", line)
            assert found, line + process.stderr.read()
            yield process, int(found[1])
        finally:
            process.kill()
