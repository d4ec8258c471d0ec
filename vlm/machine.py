"""CPUs and memory available to this process, and its rank in a distributed job."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Files with limits of Linux control groups. Version 2 has a single hierarchy, version 1 one per controller.
V2 = {"cpu": ["cpu.max"], "memory": ["memory.max"]}
V1 = {"cpu": ["cpu.cfs_quota_us", "cpu.cfs_period_us"], "memory": ["memory.limit_in_bytes"]}
NO_LIMIT = 1 << 60  # version 1 states no limit as a number near 2 ** 63


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


def is_idle() -> bool:
    """Returns True if the load of the last minute leaves enough idle CPUs for this process."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] + cores() <= usable_cpus() + 0.5


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


def memory_size() -> int | None:
    """Returns the machine's memory in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


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


TORCHELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun only; Lightning detects it by this
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
INTERACTIVE = ("bash", "interactive")  # names of interactive SLURM jobs, as in Lightning


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
