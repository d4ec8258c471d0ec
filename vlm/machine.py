"""This process on its machine: CPUs, memory, rank in a distributed job, and settings made before torch is imported."""

import ctypes
import gc
import logging
import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Files with limits of Linux control groups. Version 2 has a single hierarchy, version 1 one per controller.
V2 = {"cpu": ["cpu.max"], "memory": ["memory.max"]}
V1 = {"cpu": ["cpu.cfs_quota_us", "cpu.cfs_period_us"], "memory": ["memory.limit_in_bytes"]}
NO_LIMIT = 1 << 60  # version 1 states no limit as a number near 2 ** 63
TORCHELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun only; Lightning detects it by this
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
INTERACTIVE = ("bash", "interactive")  # names of interactive SLURM jobs, as in Lightning
SPIN_COUNT = "3000"  # iterations that an idle OpenMP thread spins before it sleeps
LONG_SPIN_COUNT = "30000"  # the same, if no other process needs the core
# Size of oneDNN's cache of kernels, one per shape of product: up to 0.75 MB, 1 to 6 ms to create.
PRIMITIVE_CACHE_SIZE = "512"
RETAINED_BYTES = 1 << 30  # of freed memory, which is also the maximum size of allocations from it
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's parameters
START_GROWTH = 256 << 20  # bytes that a training may grow by before freed memory is returned


def cores(root: Path = Path("/")) -> int:
    """Returns the number of CPUs available to this process: usable CPUs, limited by the container's quota.

    Args:
        root: Folder that contains proc and sys.
    """
    quota = cpu_quota(root)
    return usable_cpus() if quota is None else max(1, min(usable_cpus(), math.ceil(quota)))


def usable_cpus() -> int:
    """Returns the number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the container's CPU quota as a number of CPUs; None for no quota."""
    shares = []
    for values in _limits("cpu", root):
        quota, period, *_ = [*values, "100000"]
        if quota not in ("max", "-1"):
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Returns the container's memory limit in bytes; None for no limit."""
    sizes = [int(values[0]) for values in _limits("memory", root) if values[0] != "max"]
    return min((size for size in sizes if size < NO_LIMIT), default=None)


def _limits(controller: str, root: Path) -> Iterator[list[str]]:
    """Yields the fields of each limit of a controller on this process, from its cgroup and the parents of that."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for number, names, group in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if number == "0":
            top, files = base if (base / "cgroup.controllers").exists() else base / "unified", V2[controller]
        elif controller in names.split(","):
            top, files = (base / names if (base / names).exists() else base / controller), V1[controller]
        else:
            continue
        cgroup = top / group.lstrip("/")
        folders = [cgroup, *cgroup.parents]
        for folder in folders[: folders.index(top) + 1]:
            try:
                yield [word for name in files for word in (folder / name).read_text().split()]
            except (OSError, ValueError):
                continue  # the cgroup has no limit, or the path is the host's


@dataclass(frozen=True)
class Rank:
    """The rank of a process.

    Args:
        rank: Global rank.
        world: Number of processes.
        local: Rank on its machine.
    """

    rank: int = 0
    world: int = 1
    local: int = 0


def rank_by_launcher(sign: str = "RANK") -> Rank:
    """Returns the rank of this process; that of a single process if no launcher started several.

    A process of a SLURM job that was not started with srun also has SLURM_NTASKS, but is a single process.

    Args:
        sign: Variable that identifies torchrun, because other launchers also set RANK and WORLD_SIZE.
    """
    srun = "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE
    for names, holds in ((TORCHRUN, sign in os.environ), (SRUN, srun)):
        if holds and {*names[:2]} <= os.environ.keys():
            return Rank(*(int(os.environ.get(name, 0)) for name in names))
    return Rank()


def tune(*, single_threaded: bool = False) -> None:
    """Sets process defaults that the environment does not set. Call it before importing torch; see docs/scaling.md.

    Args:
        single_threaded: Whether no other thread prepares data, so that OpenMP threads may spin longer if the
            machine is idle.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        # The load of the last minute leaves enough idle CPUs for this process.
        is_idle = hasattr(os, "getloadavg") and os.getloadavg()[0] + cores() <= usable_cpus() + 0.5
        os.environ["GOMP_SPINCOUNT"] = LONG_SPIN_COUNT if single_threaded and is_idle else SPIN_COUNT
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", PRIMITIVE_CACHE_SIZE)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns about a read-only home folder
    limit_threads()
    keep_freed_memory()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # else the next opened file gets its descriptor, and libraries print to it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def limit_threads() -> None:
    """Limits torch to the container's CPU quota, which it ignores, unless OMP_NUM_THREADS is set."""
    if not os.environ.get("OMP_NUM_THREADS") and cores() < usable_cpus():
        os.environ["OMP_NUM_THREADS"] = str(cores())


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory.

    By default, glibc returns the memory of large tensors to the system, which must clear the same pages again for the
    next tensors.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if platform.libc_ver()[0] != "glibc" or settings:
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, RETAINED_BYTES)
    libc.mallopt(TRIM_THRESHOLD, RETAINED_BYTES)


def return_freed_memory() -> None:
    """Returns freed memory to the system. Repacking layers fragments it, so that few tensors could reuse it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def paused_collection() -> Iterator[None]:
    """Context that pauses the collection of cyclic garbage.

    For importing torch and for loading a model: collections would search the same 300,000 objects many times, and find
    next to nothing to free.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GrowthLimiter:
    """Returns freed memory to the system when a training has grown by START_GROWTH.

    The first steps leave gaps of many sizes between blocks that stay, such as optimizer states and oneDNN's generated
    code, and few later tensors fit into them. Steps after a return cost page faults, so returns become rare.
    """

    def __init__(self) -> None:
        self._resident = self._read_resident()

    def check(self, step: int) -> None:
        """Checks the growth if the number of completed steps is a power of two."""
        if step & (step - 1) == 0 and self._read_resident() > self._resident + START_GROWTH:
            return_freed_memory()
            self._resident = self._read_resident()

    @staticmethod
    def _read_resident() -> int:
        """Returns this process's resident memory in bytes; 0 without proc, where nothing is returned."""
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")
