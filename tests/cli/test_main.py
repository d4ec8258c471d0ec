"""The process of a command."""

import subprocess
import sys

import pytest

IMPORTS_TRITON = """
import sys, triton._C.libtriton
sys.argv = ["vlm", "--version"]
from vlm.cli.main import main
main()
"""


def test_nothing_is_reported_as_leaked_at_exit() -> None:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", IMPORTS_TRITON], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("vlm ") and done.stderr == ""
