"""Pictures of attention maps."""

import io
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vlm.errors import printable
from vlm.inference.attention.maps import Map
from vlm.nn.image_size import scaled

TILE, GAP = 128, 20  # pixels of a tile's longer side, and of the space above it for its word
GLOW = np.array([110.0, 75.0, 10.0])  # colour added at the largest weight
Band = tuple[str, Sequence[Map]]


def attention_picture(pixels: Tensor, maps: Sequence[Map], *, columns: int = 6) -> bytes:
    """Draws a PNG of the image, then of a copy for each word that is bright where the model attended.

    Args:
        pixels: uint8 (3, H, W).
        maps: As from `word_maps`.
    """
    return bands_picture(pixels, [("", maps)], columns=columns)


def bands_picture(pixels: Tensor, bands: Sequence[Band], *, columns: int = 6) -> bytes:
    """Draws a PNG of bands of pictures, each under its title; the first begins with the image itself.

    Args:
        pixels: uint8 (3, H, W).
    """
    image = pixels.permute(1, 2, 0).cpu().numpy()  # (H, W, 3)
    high, wide = scaled(image.shape[:2], TILE)
    letters, lines = font(14), list(_lines(bands, columns))
    width = columns * (wide + GAP) + GAP
    height = sum(GAP + 4 if isinstance(line, str) else high + 2 * GAP for line in lines)
    sheet = Image.new("RGB", (width, height), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for line in lines:
        if isinstance(line, str):
            draw.text((GAP, top + GAP // 2 + 2), printable(line), fill="#444444", font=letters, anchor="lm")
            top += GAP + 4
            continue
        for place, (word, weights) in enumerate(line):
            left = GAP + place * (wide + GAP)
            shown = Image.fromarray(image if weights is None else _lit(image, weights))
            sheet.paste(shown.resize((wide, high), Image.Resampling.LANCZOS), (left, top + GAP))
            draw.text((left + wide // 2, top + GAP // 2), printable(word), fill="black", font=letters, anchor="mm")
        top += high + 2 * GAP
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()


def _lines(bands: Sequence[Band], columns: int) -> Iterator[str | Sequence[tuple[str, np.ndarray | None]]]:
    """Yields titles and rows of pictures, from top to bottom."""
    for number, (title, maps) in enumerate(bands):
        if title:
            yield title
        tiles: list[tuple[str, np.ndarray | None]] = [*([("", None)] if number == 0 else []), *maps]
        for start in range(0, len(tiles), columns):
            yield tiles[start : start + columns]


def font(size: int) -> ImageFont.FreeTypeFont:
    """Returns DejaVu Sans, which covers many scripts; matplotlib ships it."""
    package = find_spec("matplotlib")
    assert package is not None and package.origin is not None
    return ImageFont.truetype(Path(package.origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf", size)


def _lit(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Darkens an image where weights are small; adds a warm glow where they are large, to show on dark images too."""
    light = Image.fromarray((255 * weights / max(float(weights.max()), 1e-12)).astype(np.uint8))
    heat = np.asarray(light.resize((image.shape[1], image.shape[0]), Image.Resampling.BICUBIC))[..., None] / 255
    return (image * (0.2 + 0.6 * heat) + GLOW * heat).clip(0, 255).astype(np.uint8)
