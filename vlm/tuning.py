"""Settings of a process before torch loads: waiting threads, the memory it keeps, its standard streams."""

import ctypes
import os
import platform
import sys

SPINS = "3000"  # how often a thread looks whether there is work before it sleeps
PRIMITIVES = "512"  # pieces of code that oneDNN keeps, one a product's shape: up to 0.75 MB, and 1 to 6 ms to make
KEPT = 1 << 30  # bytes of freed memory that are kept, and below which memory is taken from what was freed
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's names for them


def tune() -> None:
    """Settles what the environment leaves open; call before torch loads. docs/scaling.md has the measurements."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", PRIMITIVES)
    keep_freed_memory()
    open_streams()


def keep_freed_memory() -> None:
    """Has the C library keep what is freed.

    By default glibc returns large tensors to the system at once, which has to clear the same pages again for the next
    ones of the same step.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if platform.libc_ver()[0] != "glibc" or settings:
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, KEPT)
    libc.mallopt(TRIM_THRESHOLD, KEPT)


def return_freed_memory() -> None:
    """Returns what was freed to the system, as layers that were laid out anew leave holes that few others fit."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def open_streams() -> None:
    """Opens on nothing those of stdin, stdout and stderr that are closed, as `<&-` and `>&-` leave them.

    Else the next file that is opened takes their number, and with it what libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
