"""An interrupt while a training still imports its modules."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, runpy, signal, sys
interrupted = sys.argv.pop()
class Finder:
    def find_spec(self, name, *rest):
        if name == interrupted:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.sample(plain=1, slow=1)
@pytest.mark.parametrize(
    "module", ["vlm.training.run.fit", "omegaconf", pytest.param("lightning", marks=pytest.mark.slow)]
)
def test_it_leaves_no_traceback(module):
    run = [sys.executable, "-c", PROGRAM, module]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode in (-signal.SIGINT, 130) and "Traceback" not in done.stderr, done.stderr
