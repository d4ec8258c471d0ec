"""Inputs of tasks, from the command line and from Python: found, and read ahead of the model."""

import glob
import os
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Event
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from vlm.data.images.image import SUFFIXES, load_image
from vlm.data.text.words import read_lines, split_lines
from vlm.errors import UserError
from vlm.inference.options import Kind, Option, refuse_undecoded
from vlm.io.files import listed
from vlm.machine import cores

CHUNK = 8  # images that a worker reads at once; handing over each alone costs as much as reading a small one


@cache  # reading a container's quota takes 0.3 ms, a twentieth of a caption
def default_workers() -> int:
    """Returns the number of CPUs of this process, at most 8."""
    return min(8, cores())


def find_images(inputs: Sequence[str], *, repeated: bool = False) -> list[str]:
    """Returns the image files that arguments name: files, the images in folders, and matches of patterns.

    "-" reads names of files, folders and patterns from stdin, one per line.

    Args:
        repeated: Whether a file that is named several times is returned as often.
    Raises:
        UserError: A folder or pattern holds no image.
    """
    paths: list[str] = []
    for place in listed(inputs):
        if not place:
            raise UserError("an input is empty; give image files, a folder that holds some, or a pattern")
        if os.path.isdir(place):
            matches = sorted(str(path) for path in Path(place).rglob("*") if path.suffix.lower() in SUFFIXES)
        elif not os.path.exists(place) and glob.has_magic(place):
            matches = sorted(path for path in glob.glob(place, recursive=True) if not os.path.isdir(path))
        else:
            matches = [place]
        if not matches:
            raise UserError(f"{place}: no images found; give image files, a folder that holds some, or a pattern")
        paths += matches
    return paths if repeated else list(dict.fromkeys(paths))


def several_images(inputs: Any) -> tuple[list[Any], bool]:
    """Converts a Python value to sources of images: paths, folders, patterns, images of Pillow, arrays; one or many.

    Returns:
        Sources for `open_image`, and whether the value was a single image.
    Raises:
        UserError: A folder or pattern holds no image.
    """
    if isinstance(inputs, str | os.PathLike):
        paths = find_images([os.fspath(inputs)])
        return paths, paths == [os.fspath(inputs)]
    if callable(inputs) or isinstance(inputs, Image.Image) or (isinstance(inputs, np.ndarray) and inputs.ndim < 4):
        return [inputs], True
    if not isinstance(inputs, Iterable):
        raise _no_image(inputs)
    return [source for one in inputs for source in several_images(one)[0]], False


def open_image(source: Any) -> Any:
    """Opens an image: a path, an image of Pillow, a function that opens it, or an array.

    An array is of uint8 or of floats from 0 to 1, (H, W) or (H, W, 3 or 4). A tensor is returned as it is.

    Raises:
        ImageError: The file cannot be read.
        UserError: It is of another type.
    """
    if isinstance(source, str | os.PathLike):
        return load_image(source)
    if isinstance(source, Tensor):
        return source
    if isinstance(source, Image.Image):
        return ImageOps.exif_transpose(source)
    if callable(source):
        return source()
    if not isinstance(source, np.ndarray) or source.ndim not in (2, 3) or source.shape[2:] not in ((), (3,), (4,)):
        raise _no_image(source)
    if source.dtype.kind == "f" and source.size and source.min() >= 0 and source.max() <= 1:
        source = (source * 255).round().astype(np.uint8)
    if source.dtype != np.uint8 or not source.size:
        raise _no_image(source)
    return Image.fromarray(np.ascontiguousarray(source))


def _no_image(value: Any) -> UserError:
    shown = f"an array {value.shape} of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    return UserError(
        f"images: {shown} is none; give a path, an image of Pillow, or an array (H, W, 3) of uint8 or of floats from 0 "
        "to 1"
    )


def read_ahead(
    sources: Sequence[Any], prepare: Callable[[Any], Any], workers: int, *, ahead: int
) -> Generator[Any, None, None]:
    """Yields each source after `prepare`, in order, or the `UserError` that it raised.

    Order, values and faults do not depend on the number of workers.

    Args:
        prepare: Called from several threads.
        workers: Threads that read ahead; 0 prepares each source when it is asked for.
        ahead: Most sources that are read ahead.
    """
    return _read_ahead(sources, prepare, workers, ahead=ahead) if workers else _read(sources, prepare)


def _read(
    sources: Sequence[Any], prepare: Callable[[Any], Any], stopped: Event | None = None
) -> Generator[Any, None, None]:
    for source in sources:
        if stopped is not None and stopped.is_set():
            return
        try:
            value = prepare(source)
        except UserError as fault:
            value = fault
        yield value


def _read_ahead(
    sources: Sequence[Any], prepare: Callable[[Any], Any], workers: int, *, ahead: int
) -> Generator[Any, None, None]:
    # Threads, because decoding and resizing release the GIL. Measured processes were no faster on small images and
    # slower on large ones, which must pass through a pipe.
    chunk = max(1, min(CHUNK, len(sources) // (4 * workers)))
    stopped, waiting = Event(), deque[Future[list[Any]]]()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read images")
    try:
        for start in range(0, len(sources), chunk):
            part = sources[start : start + chunk]
            waiting.append(pool.submit(lambda part: list(_read(part, prepare, stopped)), part))
            if chunk * len(waiting) >= ahead:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:  # also at Ctrl-C: each worker stops after its current image
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)


Texts = Annotated[list[str] | None, Option("Input text. Repeatable. By default, lines of stdin.")]
Files = Annotated[list[str], Option("Images, or text files if the model reads texts.", positional=True)]


@dataclass(kw_only=True)
class Arguments(ABC):
    """The arguments of a command that name its inputs; each field is annotated with an `Option`.

    Attributes:
        kind: What an input is: a text or an image.
        words: The field that the arguments of `vlm predict` fill.
        types: Types of an input in Python.
    """

    kind: ClassVar[Kind] = "text"
    words: ClassVar[str] = "text"
    types: ClassVar[tuple[type, ...]] = (str,)

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Returns the arguments for `vlm predict WORDS`."""
        return cls(**{cls.words: list(words)})

    @abstractmethod
    def read(self) -> list[Any]:
        """The inputs.

        Raises:
            UserError: There are none, or one cannot be read.
        """

    def paths(self, inputs: Sequence[Any]) -> list[str]:
        """Returns the files that are read for the inputs from `read`; outputs may not replace them."""
        return []

    @classmethod
    def several(cls, value: Any) -> tuple[list[Any], bool]:
        """Converts a value in Python to inputs; also returns whether it was a single input.

        Raises:
            UserError: It is not an input.
        """
        alone = isinstance(value, str | os.PathLike) or not isinstance(value, Iterable)
        inputs = [value] if alone else list(value)
        for one in inputs:
            if not isinstance(one, cls.types):
                raise UserError(f"inputs: a {type(one).__name__} is not a {cls.kind}; give a str or a list of them")
        refuse_undecoded([one for one in inputs if isinstance(one, str)])
        return inputs, alone


@dataclass(kw_only=True)
class WordArguments(Arguments):
    """Words of the command line: the default inputs for a task of a user's package."""

    words = "inputs"
    types = (object,)
    inputs: Annotated[list[str], Option("Inputs.", positional=True)]

    def read(self) -> list[str]:
        return list(self.inputs)


@dataclass(kw_only=True)
class ImageArguments(Arguments):
    """Images; in Python also Pillow images and arrays."""

    kind = "image"
    words = "images"
    images: Annotated[list[str], Option("Image files, folders or patterns.", positional=True)]

    def read(self) -> list[str]:

        return find_images(self.images)

    def paths(self, inputs: Sequence[Any]) -> list[str]:
        return list(map(str, inputs))

    @classmethod
    def several(cls, value: Any) -> tuple[list[Any], bool]:

        return several_images(value)


@dataclass(kw_only=True)
class ImageFileArguments(Arguments):
    """Image files; one may be given several times, for models that read several images together."""

    kind = "image"
    words = "files"
    files: Files

    def read(self) -> list[str]:

        return find_images(self.files, repeated=True)

    paths = ImageArguments.paths
    several = ImageArguments.several


@dataclass(kw_only=True)
class FileArguments(Arguments):
    """Text files, each one input. In Python a `Path` is a file, and a str is the text itself."""

    words = "files"
    types = (str, os.PathLike)
    files: Files

    def read(self) -> list[Path]:
        return list(map(Path, self.files))

    def paths(self, inputs: Sequence[Any]) -> list[str]:
        return list(map(str, inputs))


@dataclass(kw_only=True)
class TextArguments(Arguments):
    """Texts; on a command line, lines of stdin by default."""

    text: Texts = None

    def read(self) -> list[str]:
        return read_texts([], self.text or [])


@dataclass(kw_only=True)
class LineArguments(Arguments):
    """Texts; on a command line, lines of files, or of stdin by default."""

    files: Annotated[list[str] | None, Option("Files with one text per line. By default, stdin.", positional=True)] = (
        None
    )
    text: Texts = None

    def read(self) -> list[str]:
        return read_texts(self.files or [], self.text or [])

    def paths(self, inputs: Sequence[Any]) -> list[str]:
        return list(self.files or [])


def read_texts(files: Sequence[str], texts: Sequence[str], *, named: str = "--text TEXT, a file") -> list[str]:
    """Returns texts and the lines of files, or of stdin if there are neither; only a line feed ends a line.

    Args:
        named: The arguments to suggest in an error message.
    Raises:
        UserError: There is no text, a file cannot be read, or a text is not UTF-8.
    """
    lines = [] if files or texts else split_lines("".join(sys.stdin))
    for file in files:
        lines += split_lines("".join(read_lines(Path(file))))
    lines = [*texts, *lines]
    if files and not lines:
        raise UserError(f"{files[0]}: is empty; write a text a line")
    if not lines:
        raise UserError(f"there is no text; give {named}, or a text a line on stdin")
    refuse_undecoded(lines)
    return lines
