"""Environment of a process before torch loads: the waiting of its threads and the memory it keeps."""

import ctypes
import os
import platform

SPINS = "3000"  # how often a thread looks whether there is work before it sleeps
PRIMITIVES = "256"  # pieces of code that oneDNN keeps, each for one product's shape; 0.6 MB each, and 0.25 ms to make
KEPT = 1 << 30  # bytes of freed memory that are kept, and below which memory is taken from what was freed
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's names for them


def tune() -> None:
    """Settles what the environment leaves open; call before torch loads. docs/scaling.md has the measurements."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", PRIMITIVES)
    keep_freed_memory()


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
