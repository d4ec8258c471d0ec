"""CPUs and memory that a process may use, from the files in which Linux tells of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlm import machine


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
    from vlm import tuning

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 64)
    monkeypatch.setattr(machine, "cpu_quota", lambda *root: None)
    tuning.limit_threads()
    assert os.environ.get("OMP_NUM_THREADS", "") == given.get("OMP_NUM_THREADS", "")
    monkeypatch.setattr(machine, "cpu_quota", lambda *root: 0.5)
    tuning.limit_threads()
    assert os.environ["OMP_NUM_THREADS"] == expected
