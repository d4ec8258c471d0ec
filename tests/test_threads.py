"""Threads of torch sleep while they wait, unless somebody says otherwise."""

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
print(os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize("module", ["vlm.cli", "vlm.training"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "9"}, "None")],
)
def test_the_policy_is_set_before_torch_is_loaded(module: str, given: dict[str, str], expected: str) -> None:
    program = SHOW.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"PATH": "", **given})
    assert done.stdout.split() == [expected], done.stderr
