"""Resizes images to the rectangle that a model reads; a shape is its height and width."""

from math import ceil

import numpy as np
import torch
from PIL import Image

from vlm.errors import UserError
from vlm.nn.image_size import ImageSize, sides

MAX_IMAGE_SIZE = 4096
MIN_CROP = 0.25
RESIZES = ("crop", "crop_down", "squash", "pad")
INTERPOLATIONS = ("box", "bilinear", "bicubic", "lanczos")
PAD_COLOR = (128, 128, 128)
MAX_SCALE = 8  # if a resized side exceeds the crop by more than this factor, Pillow resizes only the cropped region

Box = tuple[float, float, float, float]
Shape = tuple[int, int]


def check_geometry(image_size: ImageSize, resize: str, interpolation: str, crop: float) -> tuple[int, int]:
    """Checks preprocessing options; returns height and width.

    Raises:
        UserError: An option is invalid.
    """
    image_sides = image_size if isinstance(image_size, list | tuple) and len(image_size) == 2 else [image_size]
    if any(type(side) is not int or not 1 <= side <= MAX_IMAGE_SIZE for side in image_sides):
        wanted = f"an integer from 1 to {MAX_IMAGE_SIZE}, or two, height and width"
        raise UserError(f"image_size={image_size!r} is invalid; it must be {wanted}")
    for name, value, choices in (("resize", resize, RESIZES), ("interpolation", interpolation, INTERPOLATIONS)):
        if value not in choices:
            raise UserError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")
    if not isinstance(crop, int | float) or not MIN_CROP <= crop <= 1:
        raise UserError(f"crop={crop!r} is invalid; it must be a number from {MIN_CROP} to 1")
    return sides(image_size)


def resize_box(image: Image.Image, box: Box, shape: Shape, pad: bool, interpolation: str) -> Image.Image:
    """Crops a region of an image and resizes it to a shape, with antialiasing.

    Args:
        image: An RGB image.
        box: The region (left, top, right, bottom) in pixels; may be fractional.
        shape: Height and width of the result.
        pad: Whether to keep the region's proportions and add a grey border; else it is stretched.
        interpolation: A name in `INTERPOLATIONS`.
    """
    resample = Image.Resampling[interpolation.upper()]
    high, wide = shape
    if not pad:
        return image.resize((wide, high), resample, box)
    size, corner = find_padding(box, shape)
    canvas = Image.new("RGB", (wide, high), PAD_COLOR)
    canvas.paste(image.resize(size, resample, box), corner)
    return canvas


def find_padding(box: Box, shape: Shape) -> tuple[tuple[int, int], tuple[int, int]]:
    """Width and height of a region of an image that fits into a shape, and its corner there (left, top)."""
    high, wide = shape
    width, height = box[2] - box[0], box[3] - box[1]
    scale = min(wide / width, high / height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return size, ((wide - size[0]) // 2, (high - size[1]) // 2)


def resize_to_tensor(
    image: Image.Image, shape: Shape, resize: str, interpolation: str, crop: float = 1.0
) -> torch.Tensor:
    """The evaluation view of an RGB image, uint8 (3, *shape).

    torch resizes if it has the interpolation, four times as fast as Pillow. The result equals torchvision's Resize (and
    CenterCrop for ``crop``) of a tensor, and differs from that of a PIL image by a few grey levels.

    Args:
        resize: ``crop``, ``crop_down``, ``squash`` or ``pad``.
        interpolation: Pillow's name of a filter, in lower case.
        crop: Share of each resized side to keep, from the centre; ignored for ``pad``.
    """
    high, wide = shape
    size, (left, top) = find_crop(image.size, shape, resize, crop)
    if image.size == (wide, high) == size:
        return to_tensor(image)
    down = resize == "crop_down"
    long = size[0] > MAX_SCALE * wide or size[1] > MAX_SCALE * high
    if resize == "pad" or interpolation not in ("bilinear", "bicubic") or long:
        box: Box = (0, 0, *image.size)
        if resize != "pad":  # the region that torchvision's CenterCrop keeps, in whole pixels of the resized image
            (x, right), (y, bottom) = (
                (start * side / to, (start + cropped) * side / to)
                for side, to, cropped in zip(image.size, size, shape[::-1], strict=True)
                for start in [_crop_start(to, cropped, down=down)]
            )
            box = (x, y, right, bottom)
        return to_tensor(resize_box(image, box, shape, resize == "pad", interpolation))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]  # (1, 3, H, W), channels last in memory
    pixels = torch.nn.functional.interpolate(pixels, size[::-1], mode=interpolation, antialias=True)
    return pixels[0, :, top : top + high, left : left + wide].contiguous()


def find_crop(
    image_size: tuple[int, int], shape: Shape, resize: str, crop: float
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Width and height to which `resize_to_tensor` resizes an image, and the corner (left, top) of what it keeps.

    Args:
        image_size: Width and height of the image.
        shape, resize, crop: See `resize_to_tensor`; for ``pad``, the width and height are those of the shape.
    """
    width, height = image_size
    high, wide = shape if resize == "pad" else (int(shape[0] / crop), int(shape[1] / crop))
    if resize not in ("crop", "crop_down"):
        size = wide, high
    elif high * width >= wide * height:  # the sides are rounded like torchvision
        size = int(high * width / height), high
    else:
        size = wide, int(wide * height / width)
    down = resize == "crop_down"
    return size, (_crop_start(size[0], shape[1], down=down), _crop_start(size[1], shape[0], down=down))


def resize_longest_edge(image: Image.Image, longest: int, interpolation: str) -> Image.Image:
    """Resizes an RGB image to a longer side; the shorter side is rounded up to an even number, as in Idefics3.

    Args:
        interpolation: Pillow's name of a filter, in lower case.
    """
    return image.resize(fit_longest_edge(image.size, longest), Image.Resampling[interpolation.upper()])


def fit_longest_edge(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Width and height after `resize_longest_edge`, given those of an image."""
    shorter = _shorter_side(size, longest)
    shorter = max(1, shorter + shorter % 2)
    return (longest, shorter) if size[0] >= size[1] else (shorter, longest)


def _shorter_side(size: tuple[int, int], longer: int) -> int:
    """The length of the shorter side if the longer side has a given length, rounded down as in Idefics3."""
    ratio = size[0] / size[1]
    return int(longer / ratio if ratio >= 1 else longer * ratio)


def tile_grid(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Rows and columns of squares into which `cut_tiles` cuts an image of this width and height, at least 1."""
    longer = ceil(max(size) / side)
    shorter = ceil(_shorter_side(size, longer * side) / side)
    return (shorter, longer) if size[0] >= size[1] else (longer, shorter)


def cut_tiles(image: Image.Image, side: int, interpolation: str) -> tuple[list[Image.Image], int, int]:
    """Cuts an image into squares, row by row, then the entire image; also returns the rows and columns (Idefics3).

    The image is first stretched: its longer side is rounded up to a multiple of `side`, and so is the shorter side,
    scaled in proportion. An image of one square is not cut, and has 0 rows and columns.
    """
    resample = Image.Resampling[interpolation.upper()]
    rows, columns = tile_grid(image.size, side)
    image = image.resize((columns * side, rows * side), resample)
    if rows == columns == 1:
        return [image], 0, 0
    corners = [(side * column, side * row) for row in range(rows) for column in range(columns)]
    cut = [image.crop((left, top, left + side, top + side)) for left, top in corners]
    return [*cut, image.resize((side, side), resample)], rows, columns


def _crop_start(side: int, cropped: int, *, down: bool) -> int:
    """Index of the first pixel of a centre crop.

    Args:
        down: Whether to round half a pixel down, as `transformers` does.
    """
    return (side - cropped) // 2 if down else round((side - cropped) / 2)


def to_tensor(image: Image.Image) -> torch.Tensor:
    """The pixels of an RGB image, uint8 (3, H, W)."""
    # numpy is faster, and does not start a torch thread pool in every reading thread.
    return torch.from_numpy(np.array(np.asarray(image).transpose(2, 0, 1), order="C"))
