"""Finds image files, and reads inputs ahead of the model."""

import glob
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Event
from typing import TypeAlias, TypeVar

import numpy as np
from PIL import Image, ImageOps

from vlm.errors import UserError
from vlm.io.files import read_arguments
from vlm.machine import cores

ImageSource = str | os.PathLike[str] | Image.Image | np.ndarray | Callable[[], Image.Image]
Images: TypeAlias = "ImageSource | Iterable[Images]"
Source = TypeVar("Source")
Prepared = TypeVar("Prepared")
CHUNK = 8  # images per task of a worker; one task per image would cost as much as reading a small image


@cache  # reading a container's quota takes 0.3 ms, a twentieth of a caption
def default_workers() -> int:
    """Returns the number of CPUs of this process, at most 8."""
    return min(8, cores())


def find_images(inputs: Sequence[str], *, repeated: bool = False) -> list[str]:
    """Returns the image files for command-line arguments: files, folders and glob patterns.

    "-" reads names of files, folders and patterns from stdin, one per line.

    Args:
        repeated: Whether to keep duplicates.
    Raises:
        UserError: A folder or pattern has no image.
    """
    paths: list[str] = []
    for place in read_arguments(inputs):
        if not place:
            raise UserError("an input is empty; give image files, a folder of images, or a pattern")
        if os.path.isdir(place):
            from vlm.data.images.image import SUFFIXES  # torch

            matches = sorted(str(path) for path in Path(place).rglob("*") if path.suffix.lower() in SUFFIXES)
        elif not os.path.exists(place) and glob.has_magic(place):
            matches = sorted(path for path in glob.glob(place, recursive=True) if not os.path.isdir(path))
        else:
            matches = [place]
        if not matches:
            raise UserError(f"{place}: no images found; give image files, a folder of images, or a pattern")
        paths += matches
    return paths if repeated else list(dict.fromkeys(paths))


def collect_images(inputs: Images) -> tuple[list[ImageSource], bool]:
    """Converts a Python value to image sources: a path, folder, pattern, Pillow image or array, or an iterable of them.

    Returns:
        Sources for `open_image`, and whether the value was a single image.
    Raises:
        UserError: A folder or pattern holds no image.
    """
    if isinstance(inputs, str | os.PathLike):
        paths = find_images([os.fspath(inputs)])
        return [*paths], paths == [os.fspath(inputs)]
    if callable(inputs) or isinstance(inputs, Image.Image) or (isinstance(inputs, np.ndarray) and inputs.ndim < 4):
        return [inputs], True
    if not isinstance(inputs, Iterable):
        raise _not_an_image(inputs)
    return [source for item in inputs for source in collect_images(item)[0]], False


def open_image(source: ImageSource) -> Image.Image:
    """Opens an image from a path, a Pillow image, a function that returns an image, or an array.

    An array is of uint8 or of floats from 0 to 1, (H, W) or (H, W, 3 or 4).

    Raises:
        ImageError: The file cannot be read.
        UserError: It is of another type.
    """
    from vlm.data.images.image import load_image

    if isinstance(source, str | os.PathLike):
        return load_image(source)
    if isinstance(source, Image.Image):
        return ImageOps.exif_transpose(source)
    if callable(source):
        return source()
    if not isinstance(source, np.ndarray) or source.ndim not in (2, 3) or source.shape[2:] not in ((), (3,), (4,)):
        raise _not_an_image(source)
    if source.dtype.kind == "f" and source.size and source.min() >= 0 and source.max() <= 1:
        source = (source * 255).round().astype(np.uint8)
    if source.dtype != np.uint8 or not source.size:
        raise _not_an_image(source)
    return Image.fromarray(np.ascontiguousarray(source))


def _not_an_image(value: Images) -> UserError:
    description = f"a {type(value).__name__}"
    if isinstance(value, np.ndarray):
        description = f"an array {value.shape} of {value.dtype}"
    return UserError(
        f"images: {description} is not an image; give a path, a Pillow image, or an array (H, W, 3) of uint8 or of "
        "floats from 0 to 1"
    )


def read_ahead(
    sources: Sequence[Source], prepare: Callable[[Source], Prepared], workers: int, *, ahead: int
) -> Generator[Prepared | UserError, None, None]:
    """Yields each source after `prepare`, in order, or the `UserError` that it raised.

    Order, values and faults do not depend on the number of workers.

    Args:
        prepare: Called from several threads.
        workers: Number of threads that read ahead; 0 prepares each source on demand.
        ahead: Maximum number of sources that are read ahead.
    """
    if not workers:
        yield from _prepare_sources(sources, prepare)
        return
    # Threads, because decoding and resizing release the GIL. Measured processes were no faster on small images and
    # slower on large ones, which must pass through a pipe.
    chunk = max(1, min(CHUNK, len(sources) // (4 * workers)))
    stopped, waiting = Event(), deque[Future[list[Prepared | UserError]]]()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read images")
    try:
        for start in range(0, len(sources), chunk):
            part = sources[start : start + chunk]
            waiting.append(pool.submit(lambda part: list(_prepare_sources(part, prepare, stopped)), part))
            if chunk * len(waiting) >= ahead:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:  # also at Ctrl-C: each worker stops after its current image
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _prepare_sources(
    sources: Sequence[Source], prepare: Callable[[Source], Prepared], stopped: Event | None = None
) -> Generator[Prepared | UserError, None, None]:
    for source in sources:
        if stopped is not None and stopped.is_set():
            return
        value: Prepared | UserError
        try:
            value = prepare(source)
        except UserError as fault:
            value = fault
        yield value
