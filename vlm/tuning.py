"""Process settings that must precede torch's import: spinning threads, memory allocation, standard streams."""

import ctypes
import logging
import os
import platform
import sys

from vlm import machine

SPINS = "3000"  # iterations that an idle thread spins before it sleeps
LONG_SPINS = "30000"  # the same, if no other process needs the core
PRIMITIVES = "512"  # size of oneDNN's cache of kernels, one per shape of product: up to 0.75 MB, 1 to 6 ms to create
KEPT = 1 << 30  # bytes of freed memory to keep, and maximum size of allocations from it
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's parameters


def tune(*, alone: bool = False) -> None:
    """Sets what the environment does not; call it before importing torch. docs/scaling.md has the measurements.

    Args:
        alone: Whether no other thread reads or prepares data, so that threads may spin longer if the machine is idle.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = LONG_SPINS if alone and machine.is_idle() else SPINS
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", PRIMITIVES)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns about a home that is read-only
    limit_threads()
    keep_freed_memory()
    open_streams()


def limit_threads() -> None:
    """Limits torch to the container's CPU quota, which it does not read, unless OMP_NUM_THREADS is set."""
    if not os.environ.get("OMP_NUM_THREADS") and machine.cores() < machine.usable_cpus():
        os.environ["OMP_NUM_THREADS"] = str(machine.cores())


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory.

    By default, glibc returns large tensors to the system at once, which has to clear the same pages again for the next
    tensors of the same step.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if platform.libc_ver()[0] != "glibc" or settings:
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, KEPT)
    libc.mallopt(TRIM_THRESHOLD, KEPT)


def return_freed_memory() -> None:
    """Returns freed memory to the system; repacked layers leave holes that few other tensors fit."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def open_streams() -> None:
    """Opens closed standard streams on the null device.

    Otherwise the next file that is opened gets their number, and with it the output of libraries.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
