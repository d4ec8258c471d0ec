"""Process settings that must be set before torch is imported: threads, memory allocation, standard streams."""

import ctypes
import logging
import os
import platform
import sys

from vlm import machine

SPIN_COUNT = "3000"  # iterations that an idle OpenMP thread spins before it sleeps
LONG_SPIN_COUNT = "30000"  # the same, if no other process needs the core
# Size of oneDNN's cache of kernels, one per shape of product: up to 0.75 MB, 1 to 6 ms to create.
PRIMITIVE_CACHE_SIZE = "512"
RETAINED_BYTES = 1 << 30  # of freed memory, which is also the maximum size of allocations from it
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's parameters


def tune(*, single_threaded: bool = False) -> None:
    """Sets process defaults that the environment does not set. Call it before importing torch; see docs/scaling.md.

    Args:
        single_threaded: Whether no other thread prepares data, so that OpenMP threads may spin longer if the
            machine is idle.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = LONG_SPIN_COUNT if single_threaded and machine.is_idle() else SPIN_COUNT
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", PRIMITIVE_CACHE_SIZE)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns about a read-only home folder
    limit_threads()
    keep_freed_memory()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # else the next opened file gets its descriptor, and libraries print to it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def limit_threads() -> None:
    """Limits torch to the container's CPU quota, which it ignores, unless OMP_NUM_THREADS is set."""
    if not os.environ.get("OMP_NUM_THREADS") and machine.cores() < machine.usable_cpus():
        os.environ["OMP_NUM_THREADS"] = str(machine.cores())


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
