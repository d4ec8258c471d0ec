"""On Windows itself a line says where the package runs."""

import subprocess
import sys


def test_windows_itself_is_refused_in_a_line():
    code = "import os; os.name = 'nt'; import vlm"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("error: vlm runs on Linux")
