"""Reading images ahead of the model that takes them."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from PIL import Image
from torch import Tensor

from vlm.data.images.image import ImageError, load_image
from vlm.errors import print_error
from vlm.inference.files import progress

Read = Tensor | ImageError

CHUNK = 8  # images that a worker reads at once: handing them over one by one costs as much as reading a small one


def default_workers() -> int:
    """As many as there are CPUs for this process, up to 8."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cpus)


def read_images(
    paths: Sequence[str], pixels: Callable[[Image.Image], Tensor], *, batch_size: int, workers: int = 0
) -> Iterator[tuple[list[str], list[Tensor], int]]:
    """Reads image files in batches; a file that cannot be read is named on stderr and left out.

    Order, pixels and messages do not depend on the number of workers.

    Args:
        pixels: Makes of an image what the model reads; called from several threads.
        workers: Threads that read ahead, by at most two batches; 0 reads each batch when it is asked for.
    Yields:
        The paths of a batch, their pixels, and how many could not be read; never an empty batch but for failures.
    """
    starts = range(0, len(paths), batch_size)
    images = _read_ahead(paths, pixels, workers, ahead=2 * batch_size) if workers else _read(paths, pixels)
    try:
        for start in progress(starts, len(starts), "batches"):
            batch = paths[start : start + batch_size]
            good, read = [], []
            for path, one in zip(batch, images, strict=False):  # the batch ends first
                if isinstance(one, ImageError):
                    print_error(one)
                else:
                    good.append(path)
                    read.append(one)
            yield good, read, len(batch) - len(good)
    finally:
        images.close()


def _read(
    paths: Sequence[str], pixels: Callable[[Image.Image], Tensor], stopped: Event | None = None
) -> Generator[Read, None, None]:
    for path in paths:
        if stopped is not None and stopped.is_set():
            return
        try:
            yield pixels(load_image(path))
        except ImageError as fault:
            yield fault


def _read_ahead(
    paths: Sequence[str], pixels: Callable[[Image.Image], Tensor], workers: int, *, ahead: int
) -> Generator[Read, None, None]:
    """The yield of `_read`, made by threads: decoding and resizing let others run meanwhile.

    Processes were measured too: no faster on small images, slower on large ones, which must come through a pipe.
    """
    chunk = max(1, min(CHUNK, len(paths) // (4 * workers)))
    stopped, waiting = Event(), deque[Future[list[Read]]]()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read images")
    try:
        for start in range(0, len(paths), chunk):
            part = paths[start : start + chunk]
            waiting.append(pool.submit(lambda part: list(_read(part, pixels, stopped)), part))
            if chunk * len(waiting) >= ahead:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:  # at Ctrl-C, too: whoever is still reading ends with the image in hand
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
