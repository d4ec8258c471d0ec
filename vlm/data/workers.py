"""Worker processes of data loaders: they ignore signals to the run, and do not outlive their owner."""

import atexit
import multiprocessing.util  # before atexit.register: its exit handler would wait for workers that ours kills
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any
from weakref import WeakSet

import torch
from torch._utils import ExceptionWrapper

from vlm.errors import UserError
from vlm.machine import cores

MAX_WORKERS = 32  # workers per GPU; more only take memory
MAX_SHARED_WORKERS = 8  # workers if training uses the same CPUs
KILL_TIMEOUT = 5.0  # seconds to wait for a killed process to end
SOCKET_PATH = 107  # bytes that the path of a Unix socket may have

_workers: WeakSet[BaseProcess] = WeakSet()


def default_workers() -> int:
    """Default number of workers per device: its share of the CPUs available to this process."""
    gpus = torch.cuda.device_count()
    return max(1, min(MAX_WORKERS, cores() // gpus)) if gpus else min(MAX_SHARED_WORKERS, cores())


def worker_context() -> BaseContext:
    """The default multiprocessing context, for a DataLoader; `end_workers` ends processes started with it."""
    _make_socket_folder()
    context: Any = copy(multiprocessing.get_context())
    process_class = context.Process
    context.Queue = lambda maxsize=0: _BatchQueue(maxsize, ctx=context)

    def start_process(*args: Any, **kwargs: Any) -> BaseProcess:
        worker = process_class(*args, **kwargs)
        _workers.add(worker)
        return worker

    context.Process = start_process
    return context


def _make_socket_folder() -> None:
    """Makes the folder of the sockets through which workers send batches: one per run, which this process removes.

    It lies below /tmp if TMPDIR is too long a path for a socket, as in Python 3.14.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) + len("/pymp-12345678/listener-12345678") > SOCKET_PATH:
        tempfile.tempdir = "/tmp"
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = folder


class _BatchQueue(Queue):
    """A queue of batches that reports errors in sending, for example if a batch does not fit into shared memory.

    multiprocessing's queue prints a traceback and drops the batch, and torch waits for it forever.
    """

    def _on_queue_feeder_error(self, e: Exception, obj: Any) -> None:  # static in the base class
        number, _ = obj
        reason = str(e).splitlines()[0]
        try:
            raise UserError(
                f"a worker cannot send a batch ({reason}); give the container more shared "
                "memory (docker run --shm-size=8g), or lower data.batch_size or data.num_workers",
                1,
            )
        except UserError:
            wrapped = ExceptionWrapper(where="in DataLoader worker process")  # includes the traceback
        self.put((number, wrapped))


def ignore_signals(worker: int) -> None:
    """Keeps a worker alive when a terminal or a cluster sends a signal to all processes of a run.

    The owner still has a step to finish, and ends its workers itself.

    Args:
        worker: Index of the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Not ignored, because child processes would inherit that. The second signal takes effect, in case of orphans.
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.signal(signum, signal.SIG_DFL))


def end_workers() -> None:
    """Kills the loader workers of this process.

    torch asks each to end and waits 5 s. multiprocessing sends SIGTERM at exit, which a worker survives, and waits
    forever.
    """
    alive = [child for child in multiprocessing.active_children() if child in _workers]
    with _without_sigchld_handler():
        for worker in alive:
            worker.kill()
        for worker in alive:
            worker.join(KILL_TIMEOUT)


atexit.register(end_workers)


@contextmanager
def _without_sigchld_handler() -> Iterator[None]:
    """Keeps torch from raising an error when a worker is killed; its handler runs in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
