"""The image loader with its cache, and the preprocessing of evaluation and inference."""

import logging
import os
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from io import BytesIO
from threading import Lock
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image, ImageFile, TiffImagePlugin

from vlm.data.images.resize import (
    MAX_IMAGE_SIZE,
    MIN_CROP,
    check_geometry,
    cut_tiles,
    fit_longest_edge,
    resize_longest_edge,
    resize_to_tensor,
    tile_grid,
    to_tensor,
)
from vlm.data.images.view import View
from vlm.data.records import Record, Split, SplitView
from vlm.errors import Count, Range, UserError, printable
from vlm.nn.image_size import ImageSize, fit_longest_side, plain
from vlm.untrusted.images import guard


class CachedImages(SplitView):
    """A split that decodes each image once and keeps it in memory."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self._images: dict[int, list[Image.Image]] = {}

    def record(self, index: int, epoch: int = 0) -> Record:
        record = self.split.record(index, epoch)
        if record.open_image is not None:
            decode = [record.open_image, *record.open_more]

            def image(number: int) -> Image.Image:
                if index not in self._images:
                    self._images[index] = [open_image() for open_image in decode]
                return self._images[index][number]

            record.open_image, *record.open_more = [partial(image, number) for number in range(len(decode))]
        return record


FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
# fmt: off
SUFFIXES = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".webp",
    ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm",
})
# fmt: on
MAX_BYTES = 2**28
MAX_PIXELS = 2**26  # decoding takes up to eight bytes per pixel, in every worker
MAX_SIDE = 2**16
# Pillow decodes these variants of PPM and BMP in Python, at about a second per million pixels.
SLOW_CODECS = ("ppm", "ppm_plain", "bmp_rle")
MAX_SLOW_PIXELS = 2**22
MAX_WEBP_PIXELS = 2**25  # the decoder holds three copies
MAX_SLOW_BYTES = 2**25
LARGE_PIXELS = 2**22  # larger images are decoded by one thread at a time, to bound memory

Source = str | os.PathLike[str] | bytes

_large = Lock()
_BAND = 2**20  # pixels converted at once by conversions that need copies
_UNDO_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

SIDEWAYS = (5, 6, 7, 8)  # orientations that exchange width and height

# Pillow warns of metadata faults that do not affect pixels, and of what is rejected here anyway. Its log messages do
# not go to stderr unless the program configures logging.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").addHandler(logging.NullHandler())


class ImageError(UserError):
    """An image that cannot be read; the message is ``PATH: reason``."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(printable(message), status)


class ImageTooLarge(ImageError):
    """An image with more pixels than allowed."""


def load_image(source: Source, name: str = "<bytes>", *, min_side: int | None = None) -> Image.Image:
    """Reads an image: upright, RGB, 8 bits, the first frame of an animation, transparency over white.

    The format is detected from the content, not from the file name. 12- and 16-bit grey keeps its high 8 bits. 32-bit
    or float grey is scaled from the first of [0, 1], [0, 255], [0, 65535] that holds its values, else from its own
    range. A TIFF whose tags say that white is zero is inverted.

    Args:
        source: Path of a regular file, or its content.
        name: Name of the content, for messages.
        min_side: Allows decoding at 1/2, 1/4 or 1/8 of the size if both sides keep at least this many pixels.
    Raises:
        ImageError: The image cannot be read completely.
    """
    name = name if isinstance(source, bytes) else os.fspath(source)
    try:
        return _decode(source if isinstance(source, bytes) else _read_regular(name), min_side)
    except Exception as error:  # decoders raise many types of exceptions for corrupt files
        raise _image_error(name, error) from error


def count_decoded_pixels(content: bytes, name: str = "<bytes>", *, min_side: int | None = None) -> int:
    """Number of pixels that `load_image` decodes, from the file's header; arguments and errors as there."""
    try:
        image, _ = _open(content, min_side)
    except Exception as error:
        raise _image_error(name, error) from error
    return image.width * image.height


def read_image_size(content: bytes, name: str = "<bytes>") -> tuple[int, int]:
    """Width and height of the upright image, from the file's header; arguments and errors as in `load_image`."""
    try:
        image, orientation = _open(content, None)
    except Exception as error:
        raise _image_error(name, error) from error
    return (image.height, image.width) if orientation in SIDEWAYS else (image.width, image.height)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of an image file.

    Raises:
        ImageError: It is not a regular file, too large, or unreadable.
    """
    try:
        return _read_regular(os.fspath(path))
    except Exception as error:
        raise _image_error(os.fspath(path), error) from error


def _image_error(name: str, error: Exception) -> ImageError:
    """Converts an exception to an ImageError that names the image."""
    if isinstance(error, Image.UnidentifiedImageError):
        return ImageError(f"{name}: damaged, or not an image of a known format ({', '.join(FORMATS)})")
    if isinstance(error, Image.DecompressionBombError):
        return ImageTooLarge(f"{name}: has more than {MAX_PIXELS:,} pixels")
    if not isinstance(error, ImageError | ValueError | MemoryError) and not getattr(error, "strerror", None):
        return ImageError(f"{name}: the file is truncated or damaged")  # in Pillow: "Truncated File Read", and others
    kind = ImageTooLarge if isinstance(error, ImageTooLarge) else ImageError
    reason = " ".join(str(error).split()) or f"cannot be decoded ({type(error).__name__})"
    return kind(f"{name}: {getattr(error, 'strerror', None) or reason}")


def _read_regular(path: str) -> bytes:
    if not stat.S_ISREG(os.stat(path).st_mode):  # checked before opening: a pipe would block, a device may act
        raise ValueError("is a folder" if os.path.isdir(path) else "not a regular file")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"the file has {status.st_size:,} bytes; at most {MAX_BYTES:,} are allowed")
        return file.read(status.st_size)


def _open(data: bytes, min_side: int | None) -> tuple[ImageFile.ImageFile, int]:
    """Opens an image without decoding its pixels; returns it and the EXIF orientation to undo."""
    if not data:
        raise ValueError("the file is empty")
    data, orientation = guard(data)
    image = Image.open(BytesIO(data), formats=FORMATS)
    _check_size(image, len(data))
    if min_side is not None and not image.info.get("progressive"):  # its decoder holds the whole image anyway
        image.draft(None, (min_side, min_side))
    return image, orientation


def _decode(data: bytes, min_side: int | None = None) -> Image.Image:
    image, orientation = _open(data, min_side)
    with _large if image.width * image.height > LARGE_PIXELS else nullcontext():
        image.load()
        rgb = to_rgb(image)
        factor = 1 if min_side is None else next((by for by in (8, 4, 2) if min(rgb.size) >= by * min_side), 1)
        # A new image in any case: the result must not carry the file's metadata.
        rgb = rgb.reduce(factor) if factor > 1 else rgb.copy() if rgb is image else rgb
    del image  # frees its pixels before the next copy
    rgb.info = {}
    return rgb.transpose(_UNDO_ORIENTATION[orientation]) if orientation in _UNDO_ORIENTATION else rgb


def _check_size(image: ImageFile.ImageFile, size: int) -> None:
    width, height = image.size
    slow = any(tile[0] in SLOW_CODECS for tile in image.tile)
    max_pixels = MAX_SLOW_PIXELS if slow else MAX_WEBP_PIXELS if image.format == "WEBP" else MAX_PIXELS
    if max(width, height) > MAX_SIDE or width * height > max_pixels:
        kind = f"{'this variant of ' if slow else ''}{image.format} may have"
        raise ImageTooLarge(f"{width} x {height} is too large; {kind} {max_pixels:,} pixels and a side of {MAX_SIDE:,}")
    if slow and size > MAX_SLOW_BYTES:
        raise ImageTooLarge(f"the file has {size:,} bytes; this variant of {image.format} may have {MAX_SLOW_BYTES:,}")


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts to 8-bit RGB with transparency over white; an opaque RGB image is returned as it is."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _to_eight_bits(image)
    if image.has_transparency_data:
        white = Image.new("RGB", image.size, "white")
        for top, band in _iter_bands(image):
            layer = band.convert("RGBA")
            white.paste(layer, (0, top), layer.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _iter_bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yields horizontal bands from top to bottom, to bound the memory of conversions."""
    rows = max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Converts grey of more than 8 bits: the high bits of unsigned integers, else the range of all values."""
    tags: Mapping[int, Any] = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
    bits = tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0]
    keeps_high_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    # Pillow's mode I holds signed numbers; a TIFF's are unsigned unless its tags say otherwise.
    unsigned = image.mode == "I" and bits == 32 and tags.get(TiffImagePlugin.SAMPLEFORMAT, (1,))[0] == 1
    low, span = (0.0, 1.0) if keeps_high_bits else _find_range(image, unsigned)
    # Pillow inverts images of up to 8 bits itself.
    white_is_zero = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
    grey = Image.new("L", image.size)
    for top, band in _iter_bands(image):
        if keeps_high_bits:
            values = np.asarray(band)
            eight = (values >> ((12 if bits == 12 else 16) - 8)).astype(np.uint8)
            if (transparent := band.info.get("transparency")) is not None:
                eight[values == transparent] = 255
        else:
            eight = np.rint((_finite_values(band, unsigned) - low) * (255 / span)).astype(np.uint8)
        grey.paste(Image.fromarray(255 - eight if white_is_zero else eight), (0, top))
    return grey


def _find_range(image: Image.Image, unsigned: bool) -> tuple[float, float]:
    """Returns the value of black, 0 or a negative minimum, and the distance of white from it on the likeliest scale."""
    finite = (_finite_values(band, unsigned) for _, band in _iter_bands(image))
    ends = [(float(values.min()), float(values.max())) for values in finite]
    low, high = min(0.0, *(low for low, _ in ends)), max(high for _, high in ends)
    top = high if low < 0 else next((top for top in (1.0, 255.0, 65535.0) if high <= top), high)
    return low, (top - low) or 1.0


def _finite_values(band: Image.Image, unsigned: bool) -> np.ndarray:
    stored = np.asarray(band)
    values = np.array(stored.view(np.uint32) if unsigned else stored, dtype=np.float64)
    values[~np.isfinite(values)] = 0
    return values


def _check_channels(name: str, values: Sequence[float]) -> list[float]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != 3 or not np.isfinite(numbers).all():
        raise UserError(f"data.preprocess.{name}={values!r}: is invalid; give three numbers, one per channel")
    return numbers


@lru_cache(maxsize=64)
def _channel_tensor(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """One value per channel, (3, 1, 1); cached, because copying it to a GPU in each step would wait for the GPU."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)[:, None, None]


class Preprocess:
    """Deterministic preprocessing; a checkpoint stores its `state`.

    None means the value of the pretrained encoder, if there is one (training fills it in, see
    `vlm.training.run.build`), else the default.

    Args:
        image_size: Height and width that the model sees; one number for a square.
        resize: ``crop`` resizes the image until it covers that rectangle, and crops the centre (torchvision's Resize
            and CenterCrop); ``crop_down`` is the same as in `transformers`, with half pixels rounded down; ``squash``
            stretches the image, as TrOCR does lines of text; ``pad`` fits all of it with a grey border. Default crop.
        mean: Mean of the three channels, for values in [0, 1].
        std: Standard deviation of the three channels.
        interpolation: A name in `INTERPOLATIONS`, always antialiased. Default bicubic.
        crop: Share of each resized side that ``crop`` and ``squash`` keep; default 1. 0.875 keeps 224 of 256 pixels.
        longest_edge: Length to which the longer side is resized first, as in Idefics3; None to skip this step.
        tiles: Whether `views` then cuts the image into squares.
        default_mean, default_std: Used if mean and std are None and the encoder has none.
    Shapes:
        PIL image -> uint8 (3, H, W)
    Raises:
        UserError: An argument is invalid.
    """

    def __init__(
        self,
        *,
        image_size: ImageSize,
        resize: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        interpolation: str | None = None,
        crop: Annotated[float, Range(MIN_CROP, 1)] | None = None,
        longest_edge: Count | None = None,
        tiles: bool = False,
        default_mean: Sequence[float] = (0.5, 0.5, 0.5),
        default_std: Sequence[float] = (0.5, 0.5, 0.5),
    ) -> None:
        self.resize = "crop" if resize is None else resize
        self.interpolation = "bicubic" if interpolation is None else interpolation
        self.crop = 1.0 if crop is None else crop
        self.longest_edge, self.tiles = longest_edge, tiles
        self.image_size = check_geometry(image_size, self.resize, self.interpolation, self.crop)
        if longest_edge is not None and not (type(longest_edge) is int and 1 <= longest_edge <= MAX_IMAGE_SIZE):
            raise UserError(f"longest_edge={longest_edge!r} is invalid; it must be an integer up to {MAX_IMAGE_SIZE}")
        if tiles and len({*self.image_size}) > 1:
            raise UserError(f"tiles are squares, and image_size={plain(self.image_size)} is none; give one number")
        self.mean = _check_channels("mean", default_mean if mean is None else mean)
        self.std = _check_channels("std", default_std if std is None else std)
        if min(self.std) <= 0:
            raise UserError(f"std={self.std!r} is invalid; give numbers greater than 0")

    def __call__(self, image: Image.Image) -> torch.Tensor:
        rgb = to_rgb(image)
        if self.longest_edge is not None:
            rgb = resize_longest_edge(rgb, self.longest_edge, self.interpolation)
        return resize_to_tensor(rgb, self.image_size, self.resize, self.interpolation, self.crop)

    def view(self, size: tuple[int, int]) -> View:
        """Where the pixels of an image of this width and height are in the preprocessed image."""
        geometry = self.image_size, self.resize, self.crop
        if self.longest_edge is None:
            return View.of_evaluation(size, *geometry)
        resized = fit_longest_edge(size, self.longest_edge)
        return View.of_evaluation(resized, *geometry).after_resize(size, resized)

    def views(self, image: Image.Image) -> tuple[torch.Tensor, int, int]:
        """Returns the squares that an image is cut into, row by row, then the entire image; and the rows and columns.

        An image that is not cut gives one square, with 0 rows and columns.

        Shapes:
            PIL image -> uint8 (T, 3, H, W), H = W
        """
        if not self.tiles or self.longest_edge is None:
            return self(image)[None], 0, 0
        rgb = resize_longest_edge(to_rgb(image), self.longest_edge, self.interpolation)
        squares, rows, columns = cut_tiles(rgb, self.image_size[0], self.interpolation)
        return torch.stack([to_tensor(square) for square in squares]), rows, columns

    def count_squares(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the squares that `views` cuts an image into, given its width and height; 0 if uncut."""
        if not self.tiles or self.longest_edge is None:
            return 0, 0
        grid = tile_grid(fit_longest_edge(size, self.longest_edge), self.image_size[0])
        return (0, 0) if grid == (1, 1) else grid

    def scaled_to(self, longest: int) -> "Preprocess":
        """The same preprocessing with the same proportions and a longer side of `longest` pixels."""
        return Preprocess(**{**self.state(), "image_size": fit_longest_side(self.image_size, longest)})

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Shapes: uint8 (B, 3, H, W) -> float32 (B, 3, H, W), on the device of the images."""
        mean, std = (_channel_tensor(tuple(values), images.device) for values in (self.mean, self.std))
        return images.to(torch.float32).div(255).sub_(mean).div_(std)

    def state(self) -> dict[str, Any]:
        """The arguments, as plain containers."""
        return {
            "image_size": plain(self.image_size),
            "resize": self.resize,
            "mean": self.mean,
            "std": self.std,
            "interpolation": self.interpolation,
            "crop": self.crop,
            **({} if self.longest_edge is None else {"longest_edge": self.longest_edge, "tiles": self.tiles}),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Preprocess":
        """Restores the preprocessing from its `state`.

        Raises:
            UserError: The state is invalid.
        """
        try:
            return cls(**state)
        except TypeError as error:
            raise UserError(f"the stored preprocessing is invalid ({error}); the file may be damaged") from error
