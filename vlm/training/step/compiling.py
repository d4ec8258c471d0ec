"""torch.compile for training: its requirements, its settings, and the time that it takes."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

VARIANTS = 64  # compiled versions of one function; blocks that differ, such as in drop_path, need one each


def missing(*, on_gpu: bool) -> str | None:
    """Returns a requirement of torch.compile that this machine lacks; None if it lacks none."""
    if on_gpu and find_spec("triton") is None:
        return "Triton (pip install triton)"
    if on_gpu and torch.cuda.get_device_capability() < (7, 0):
        return "GPU of compute capability 7.0 or more"
    variable, kind = ("CC", "C") if on_gpu else ("CXX", "C++")
    usual = ("gcc", "clang", "cc") if on_gpu else ("clang++" if sys.platform == "darwin" else "g++",)
    names = [os.environ[variable]] if os.environ.get(variable) else usual
    if any(shutil.which(name) for name in names):
        return None
    return f"{kind} compiler (looked for {', '.join(names)}; {variable} names another)"


class _Clock:
    """Measures compilations, which may begin in a forward pass or, on another thread, in a backward pass."""

    seconds = 0.0
    _began: float | None = None

    def watch(self) -> None:
        if self._began is None:
            self._began = 0.0
            from torch._dynamo import on_compile_end, on_compile_start  # only here: it takes seconds

            on_compile_start(self._start)
            on_compile_end(self._end)

    def _start(self, *args: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, *args: Any) -> None:
        assert self._began is not None
        self.seconds += time.perf_counter() - self._began


_clock = _Clock()


def seconds() -> float:
    """Time that this process has spent compiling so far."""
    return _clock.seconds


def compiler(*, on_gpu: bool) -> Callable[[Any], Any]:
    """A compiler of a block's forward pass, with the settings that blocks need; `seconds` has its time so far."""
    from torch._dynamo import config  # only here: it takes seconds

    settings: Any = config
    settings.recompile_limit = VARIANTS
    settings.optimize_ddp = False  # it would split graphs where gradients are sent; blocks are split already
    settings.skip_fsdp_guards = False  # else the code of one sharded block would be reused for different ones
    _clock.watch()
    if on_gpu:
        return torch.compile  # for a fixed size until another one comes
    # The same kernels for all sizes, loop tails included. Kernels for each size would sum in different orders, and a
    # resumed run, which has met other sizes, would arrive at other weights.
    return partial(torch.compile, dynamic=True, options={"cpp.enable_loop_tail_vec": False})
