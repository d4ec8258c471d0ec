"""Threads of torch spin for a moment while they wait, unless somebody says otherwise."""

import subprocess
import sys

import pytest

SHOW = """
import os, sys
import {module} as module
assert "torch" not in sys.modules
sys.argv = ["vlm", "--nonsense"]
try:
    module.main()
except SystemExit:
    pass
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize("module", ["vlm.cli", "vlm.training"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "None 3000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"), ({"GOMP_SPINCOUNT": "9"}, "None 9")],
)
def test_the_spin_is_set_before_torch_is_loaded(module: str, given: dict[str, str], expected: str) -> None:
    program = SHOW.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"PATH": "", **given})
    assert done.stdout.split() == expected.split(), done.stderr
