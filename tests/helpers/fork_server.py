"""Trainings in processes of their own that cost no start of Python: forked from one that has imported everything.

Run as a program it is that process: it takes orders, a JSON object a line, and never computes anything itself, so that
a fork of it is as good as a fresh start.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TRAINING = ("run.run", "run.train", "run.run_folder", "step.optim", "data_module", "callbacks.checkpoints")
PRELOADED = [f"vlm.training.{name}" for name in (*TRAINING, "callbacks.progress", "callbacks.loggers")]
PRELOADED += [f"vlm.tasks.{name}.train" for name in ("captioning", "classification", "language_modeling")]
PRELOADED += [f"vlm.data.shapes.scene_{name}" for name in ("captions", "labels")]
PRELOADED += ["vlm.data.sources.captions", "vlm.data.text.text_field", "torch._dynamo", "matplotlib.figure"]


@dataclass
class ProcessResult:
    """The exit status of a process, or minus the signal that killed it, and what it printed."""

    status: int
    output: str


class ForkServer:
    """The process that trainings are forked from."""

    def __init__(self) -> None:
        own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM", "TORCHELASTIC", "VLM_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, env=env, text=True)
        self._logs: dict[int, Path] = {}
        self._lock = threading.Lock()
        assert self._ask({"do": "ready"})["ready"]

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start(self, args: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, patch: str = "") -> int:
        """Starts `train.py` with these arguments and returns its process id, which is its group's too.

        Args:
            patch: Python that the process executes first.
        """
        log = cwd / f"log_{time.monotonic_ns()}"
        order = {"do": "start", "args": list(args), "cwd": str(cwd), "env": dict(env or {}), "log": str(log)}
        pid = self._ask({**order, "patch": patch})["pid"]
        self._logs[pid] = log
        return pid

    def wait(self, pid: int, timeout: float = 0) -> ProcessResult | None:
        """Returns the result of a process, or None if it is still running after the time."""
        end = time.monotonic() + timeout
        while (status := self._ask({"do": "look", "pid": pid})["status"]) is None:
            if time.monotonic() >= end:
                return None
            time.sleep(0.02)
        log = self._logs[pid]
        return ProcessResult(status, log.read_text(errors="replace") if log.is_file() else "")

    def run(self, args: Sequence[str], **options: Any) -> ProcessResult:
        """Runs `train.py` to its end."""
        ended = self.wait(self.start(args, **options), timeout=120)
        assert ended is not None, "it hangs"
        return ended

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    import importlib

    from vlm.config.compose import compose
    from vlm.training.config.check import check

    for name in PRELOADED:
        importlib.import_module(name)
    for path in (ROOT / "conf" / "task").glob("*.yaml"):  # which reads and remembers the classes' source
        check(compose([f"task={path.stem}"]))
    ended: dict[int, int] = {}
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {"ready": True}
        if order["do"] == "start":
            ready, started_pipe = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.setsid()
                os.close(ready)
                os.close(started_pipe)
                train(order)
            os.close(started_pipe)
            os.read(ready, 1)  # nothing comes: it is closed once there is a group that can be killed
            os.close(ready)
            answer = {"pid": pid}
        elif order["do"] == "look":
            answer = {"status": look(order["pid"], ended)}
        print(json.dumps(answer), flush=True)


def train(order: dict[str, Any]) -> None:
    """What a fork does; ends the process as Python would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for handle, opened in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(opened, handle)
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    sys.argv = [str(ROOT / "train.py"), *order["args"]]
    exec(order["patch"], {})
    from vlm.training.run.fit import main as trained

    sys.exit(trained())


def look(pid: int, ended: dict[int, int]) -> int | None:
    if pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended.get(pid)


if __name__ == "__main__":
    main()
