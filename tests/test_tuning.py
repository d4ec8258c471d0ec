"""Commands choose how threads wait and what memory is kept, unless somebody says otherwise."""

import os
import platform
import subprocess
import sys

import pytest
from tiny_checkpoints import FILES

from vlm import machine, tuning
from vlm.cli.main import run
from vlm.tuning import tune

SHOW = """
import os, sys
import {module} as module
assert "torch" not in sys.modules
sys.argv = ["vlm", "--nonsense"]
try:
    module.main()
except SystemExit:
    pass
names = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
print(*(os.environ.get(name) for name in names))
"""


@pytest.mark.parametrize("module", ["vlm.cli.main", "vlm.training.run.fit"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "None 3000 512"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None 512"),
        ({"GOMP_SPINCOUNT": "9", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7"}, "None 9 7"),
    ],
)
def test_the_environment_is_set_before_torch_is_loaded(module: str, given: dict[str, str], expected: str) -> None:
    program = SHOW.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"PATH": "", **given})
    assert done.stdout.split() == expected.split(), done.stderr


@pytest.mark.parametrize(("load", "alone", "spins"), [(0.1, True, "30000"), (0.1, False, "3000"), (1.9, True, "3000")])
def test_threads_spin_long_on_an_idle_machine_alone(load: float, alone: bool, spins: str, monkeypatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever `tune` sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 2)
    monkeypatch.setattr(tuning, "keep_freed_memory", lambda: None)
    tune(single_threaded=alone)
    assert os.environ["GOMP_SPINCOUNT"] == spins


FAULTS = """
import resource, statistics
from vlm.tuning import tune
tune()
import torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def faults_of_a_tensor():  # 100 MB, 24,000 pages
    begun = faults()
    torch.ones(25_000_000)
    return faults() - begun
for _ in range(8):  # small tensors split what the first ones freed
    faults_of_a_tensor()
print(statistics.median(faults_of_a_tensor() for _ in range(9)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
@pytest.mark.slow
@pytest.mark.parametrize(("given", "kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_pages_of_freed_tensors_are_used_again(given: dict[str, str], kept: bool) -> None:
    program = [sys.executable, "-c", FAULTS]
    done = subprocess.run(program, capture_output=True, text=True, env={"PATH": "", **given}, check=True)
    assert (int(done.stdout) < 1000) == kept, done.stdout


@pytest.mark.parametrize(("stream", "number"), [("<&-", 0), (">&-", 1), ("2>&-", 2)])
def test_a_stream_that_is_closed_is_open_on_nothing(stream: str, number: int) -> None:
    program = "import os, sys; from vlm.tuning import tune; tune(); sys.stdin.read(); print(); print(file=sys.stderr)"
    program += f"; assert os.readlink('/proc/self/fd/{number}') == os.devnull"
    done = subprocess.run(["bash", "-c", f'"$0" -c "$1" {stream}', sys.executable, program], stdin=subprocess.DEVNULL)
    assert done.returncode == 0


def test_texts_of_a_closed_stdin_are_none(monkeypatch, capsys) -> None:
    """Which is open on nothing, as above."""
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert run(["tag", "-c", str(FILES / "tagging.ckpt")]) == 2
    assert capsys.readouterr().err.startswith("error: no input text; give --text TEXT")
