"""Resizes images to the square that a model reads."""

from math import ceil

import numpy as np
import torch
from PIL import Image

PAD_COLOR = (128, 128, 128)
LONG = 8  # of an image whose longer side is so many times what is kept, only that is resized, by Pillow

Box = tuple[float, float, float, float]


def resize_box(image: Image.Image, box: Box, image_size: int, pad: bool, interpolation: str) -> Image.Image:
    """Crops a region of an image and resizes it to a square, with antialiasing.

    Args:
        image: An RGB image.
        box: The region (left, top, right, bottom) in pixels; may be fractional.
        image_size: Side of the result.
        pad: Whether to keep the region's proportions and add a grey border; else it is stretched.
        interpolation: A name in `INTERPOLATIONS`.
    """
    resample = Image.Resampling[interpolation.upper()]
    if not pad:
        return image.resize((image_size, image_size), resample, box)
    width, height = box[2] - box[0], box[3] - box[1]
    scale = image_size / max(width, height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    square = Image.new("RGB", (image_size, image_size), PAD_COLOR)
    square.paste(image.resize(size, resample, box), ((image_size - size[0]) // 2, (image_size - size[1]) // 2))
    return square


def square(image: Image.Image, image_size: int, resize: str, interpolation: str, crop: float = 1.0) -> torch.Tensor:
    """The evaluation view of an RGB image, uint8 (3, image_size, image_size).

    torch resizes if it has the interpolation, four times as fast as Pillow. The result equals torchvision's Resize (and
    CenterCrop for ``crop``) of a tensor, and differs from that of a PIL image by a few grey levels.

    Args:
        resize: ``crop``, ``crop_down``, ``squash`` or ``pad``.
        interpolation: Pillow's name of a filter, in lower case.
        crop: Share of the resized shorter side to keep, from the centre; ignored for ``pad``.
    """
    side = image_size if resize == "pad" else int(image_size / crop)
    if image.size == (image_size, image_size) and side == image_size:
        return to_tensor(image)
    size = _resized(image, side) if resize in ("crop", "crop_down") else (side, side)
    if resize == "pad" or interpolation not in ("bilinear", "bicubic") or max(size) > LONG * image_size:
        box = whole_box(image) if resize == "pad" else center_box(image, size, image_size, down=resize == "crop_down")
        return to_tensor(resize_box(image, box, image_size, resize == "pad", interpolation))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]  # (1, 3, H, W), its channels last in memory
    pixels = torch.nn.functional.interpolate(pixels, size[::-1], mode=interpolation, antialias=True)
    left, top = (_start(side, image_size, down=resize == "crop_down") for side in size)
    return pixels[0, :, top : top + image_size, left : left + image_size].contiguous()


def fitted(image: Image.Image, longest: int, interpolation: str) -> Image.Image:
    """An RGB image whose longer side has a length; its shorter one is rounded up to an even number, as Idefics3's is.

    Args:
        interpolation: Pillow's name of a filter, in lower case.
    """
    shorter = _shorter(image, longest)
    shorter = max(1, shorter + shorter % 2)
    size = (longest, shorter) if image.width >= image.height else (shorter, longest)
    return image.resize(size, Image.Resampling[interpolation.upper()])


def _shorter(image: Image.Image, longer: int) -> int:
    """The shorter side beside a longer one, rounded down as Idefics3's is."""
    ratio = image.width / image.height
    return int(longer / ratio if ratio >= 1 else longer * ratio)


def tiled(image: Image.Image, side: int, interpolation: str) -> tuple[list[Image.Image], int, int]:
    """An image as squares of a side, row by row, and the whole of it last; their rows and columns (Idefics3).

    It is stretched to whole squares first: the longer side is rounded up to them, and so is what the shorter one is
    then. An image of one square is not cut.
    """
    resample = Image.Resampling[interpolation.upper()]
    longer = ceil(max(image.size) / side)
    shorter = ceil(_shorter(image, longer * side) / side)
    columns, rows = (longer, shorter) if image.width >= image.height else (shorter, longer)
    image = image.resize((columns * side, rows * side), resample)
    if rows == columns == 1:
        return [image], 0, 0
    corners = [(side * column, side * row) for row in range(rows) for column in range(columns)]
    cut = [image.crop((left, top, left + side, top + side)) for left, top in corners]
    return [*cut, image.resize((side, side), resample)], rows, columns


def _resized(image: Image.Image, side: int) -> tuple[int, int]:
    """Width and height when the shorter side has this length, rounded like torchvision."""
    shorter = min(image.size)
    return int(side * image.width / shorter), int(side * image.height / shorter)


def whole_box(image: Image.Image) -> Box:
    """The region of the whole image."""
    return 0, 0, *image.size


def _start(side: int, shown: int, *, down: bool) -> int:
    """Index of the first pixel of a centre crop.

    Args:
        down: Whether to round half a pixel down.
    """
    return (side - shown) // 2 if down else round((side - shown) / 2)


def center_box(image: Image.Image, resized: tuple[int, int], image_size: int, *, down: bool = False) -> Box:
    """The region of an image that torchvision's ``CenterCrop(image_size)`` keeps after resizing.

    Like torchvision, it rounds to whole pixels of the resized image, to match models trained with it.

    Args:
        down: Whether to round half a pixel down, as `transformers` does.
    """
    start = [_start(side, image_size, down=down) for side in resized]
    left, top = (at * side / to for at, side, to in zip(start, image.size, resized, strict=True))
    right, bottom = ((at + image_size) * side / to for at, side, to in zip(start, image.size, resized, strict=True))
    return left, top, right, bottom


def to_tensor(image: Image.Image) -> torch.Tensor:
    """The pixels of an RGB image, uint8 (3, H, W)."""
    # numpy is faster, and does not start a torch thread pool in every reading thread.
    return torch.from_numpy(np.array(np.asarray(image).transpose(2, 0, 1), order="C"))
