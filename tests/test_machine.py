"""CPUs and memory that a process may use, and how its threads wait and its memory is kept by default."""

import gc
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from tiny_checkpoints import FILES

from vlm import machine
from vlm.cli.main import run
from vlm.machine import paused_collection, tune


def tree(root: Path, group: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": group, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


AT = "sys/fs/cgroup"
V2 = {f"{AT}/cgroup.controllers": "cpu memory"}
NO_END = str(2**63 - 4096)
CPU_V1, MEMORY_V1 = f"{AT}/cpu,cpuacct", f"{AT}/memory"
ABOVE = {f"{AT}/pod/box/cpu.max": "400000 100000", f"{AT}/pod/cpu.max": "50000 50000"}
ABOVE |= {f"{AT}/pod/box/memory.max": "max", f"{AT}/pod/memory.max": "9"}
BOX = {f"{CPU_V1}/box/cpu.cfs_quota_us": "50000", f"{CPU_V1}/box/cpu.cfs_period_us": "100000"}
BOX |= {f"{MEMORY_V1}/box/memory.limit_in_bytes": "4096", f"{MEMORY_V1}/memory.limit_in_bytes": NO_END}
FREE = {f"{AT}/cpu/cpu.cfs_quota_us": "-1", f"{AT}/cpu/cpu.cfs_period_us": "100000"}
FREE |= {f"{MEMORY_V1}/memory.limit_in_bytes": NO_END}
CASES = {  # the groups of the process, the files of limits; CPUs and bytes
    "no container": ("0::/", V2, None, None),
    "version 2": ("0::/", V2 | {f"{AT}/cpu.max": "150000 100000", f"{AT}/memory.max": "2048"}, 1.5, 2048),
    "no limit": ("0::/pod", V2 | {f"{AT}/pod/cpu.max": "max 100000", f"{AT}/pod/memory.max": "max"}, None, None),
    "the least of a group and those above": ("0::/pod/box", V2 | ABOVE, 1.0, 9),
    "a path of the host": ("0::/docker/abc", V2 | {f"{AT}/cpu.max": "200000 100000"}, 2.0, None),
    "version 1": ("5:memory:/box\n4:cpu,cpuacct:/box\n0::/", BOX, 0.5, 4096),
    "version 1, no limit": ("5:memory:/\n4:cpu:/", FREE, None, None),
    "no Linux": ("", {}, None, None),
}


@pytest.mark.parametrize("case", CASES)
def test_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    group, files, quota, memory = CASES[case]
    root = tree(tmp_path, group, files)
    assert machine.cpu_quota(root) == quota
    assert machine.memory_limit(root) == memory
    monkeypatch.setattr(machine, "usable_cpus", lambda: 8)
    assert machine.cores(root) == {None: 8, 0.5: 1, 1.0: 1, 1.5: 2, 2.0: 2}[quota]
    monkeypatch.setattr(machine, "usable_cpus", lambda: 1)
    assert machine.cores(root) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no process is bound to CPUs here")
def test_cpus_that_a_process_is_bound_to() -> None:
    program = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    program += "from vlm.machine import cores; print(cores())"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "1\n"


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3"), ({"OMP_NUM_THREADS": ""}, "1")]
)
def test_threads_follow_the_quota(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str) -> None:
    """The library that computes knows the CPUs of a process, and not the quota: each of 64 threads would have 1/64."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 64)
    monkeypatch.setattr(machine, "cpu_quota", lambda *root: None)
    machine.limit_threads()
    assert os.environ.get("OMP_NUM_THREADS", "") == given.get("OMP_NUM_THREADS", "")
    monkeypatch.setattr(machine, "cpu_quota", lambda *root: 0.5)
    machine.limit_threads()
    assert os.environ["OMP_NUM_THREADS"] == expected


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


@pytest.mark.sample(slow=4)
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
    monkeypatch.setattr(machine, "keep_freed_memory", lambda: None)
    tune(single_threaded=alone)
    assert os.environ["GOMP_SPINCOUNT"] == spins


FAULTS = """
import resource, statistics
from vlm.machine import paused_collection, tune
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


GAPS = """
import sys
from vlm.machine import START_GROWTH, GrowthLimiter, keep_freed_memory
def resident():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))
keep_freed_memory()
limiter = GrowthLimiter()
blocks = [b"x" * (1 << 20) for _ in range((START_GROWTH >> 20) + int(sys.argv[1]))]
kept = blocks[::16]
del blocks
before = resident()
limiter.check(int(sys.argv[2]))
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries manage freed memory themselves")
@pytest.mark.parametrize(
    ("more", "step", "returned"),
    [(50, 8, True), (50, 9, False), (-50, 8, False)],
    ids=["grown", "step between", "little growth"],
)
def test_freed_memory_between_used_blocks_is_returned_when_a_training_has_grown(
    more: int, step: int, returned: bool
) -> None:
    program = [sys.executable, "-c", GAPS, str(more), str(step)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 200 if returned else int(done.stdout) == 0, done.stdout


@pytest.mark.sample(plain=1, slow=1)
@pytest.mark.parametrize(("stream", "number"), [("<&-", 0), (">&-", 1), ("2>&-", 2)])
def test_a_stream_that_is_closed_is_open_on_nothing(stream: str, number: int) -> None:
    program = "import os, sys; from vlm.machine import tune; tune(); sys.stdin.read(); print(); print(file=sys.stderr)"
    program += f"; assert os.readlink('/proc/self/fd/{number}') == os.devnull"
    done = subprocess.run(["bash", "-c", f'"$0" -c "$1" {stream}', sys.executable, program], stdin=subprocess.DEVNULL)
    assert done.returncode == 0


def test_texts_of_a_closed_stdin_are_none(monkeypatch, capsys) -> None:
    """Which is open on nothing, as above."""
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert run(["tag", "-c", str(FILES / "tagging.ckpt")]) == 2
    assert capsys.readouterr().err.startswith("error: no input text; give --text TEXT")


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_after_a_pause(enabled: bool) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.self = self

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError), paused_collection():
            found = [weakref.ref(Cycle()) for _ in range(5000)]
            alive = sum(cycle() is not None for cycle in found)
            raise ValueError
        assert (alive, gc.isenabled()) == (5000, enabled)
    finally:
        (gc.enable if before else gc.disable)()
