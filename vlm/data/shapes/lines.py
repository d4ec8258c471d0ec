"""Lines of text, drawn in several fonts, slightly rotated and noisy: the default data of text recognition."""

import math
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vlm.data.records import Record
from vlm.data.shapes.scene_source import GeneratedSource, Keys
from vlm.errors import Count, Rate, UserError
from vlm.nn.image_size import ImageSize, plain, sides
from vlm.randomness import key, numpy_rng

FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSansMono")
MARGIN = 2  # pixels
LETTERS = (0.5, 0.7)  # range of the font size, as a share of the image's height
SMALLEST = 4  # minimum font size in pixels
ONSETS = ("b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "t", "v", "w", "x", "y", "z", "")
VOWELS = ("a", "e", "i", "o", "u")
CODAS = ("", "", "l", "m", "n", "r", "s", "t")
HELD_OUT = {"test": {0}, "val": {1}, "train": set(range(2, 10))}  # hash of a text modulo 10, by split


class Line(NamedTuple):
    """The text and appearance of a line.

    Args:
        text: A word, or a number.
        font: Name in `FONTS`.
        size: Font size in pixels; a smaller one is used if the text does not fit.
        turn: Rotation in degrees, counter-clockwise.
        place: Position across and down, from 0 to 1, within the free room.
        ink, paper: Brightness from 0 to 255.
        noise: Standard deviation of the noise of each pixel, and its seed.
        shape: Height and width of the image.
    """

    text: str
    font: str
    size: int
    turn: float
    place: tuple[float, float]
    ink: int
    paper: int
    noise: tuple[float, int]
    shape: tuple[int, int]


class DrawnLines(GeneratedSource):
    """Lines of one invented word or number, whose caption is the text; no two splits share a word or a number.

    Args:
        seed: Seed of all lines.
        image_size: Height and width of the images; one number for squares.
        longest: Maximum number of characters per line.
        numbers: Share of lines that are numbers.
        turn: Maximum rotation in degrees, in either direction.
        noise: Maximum standard deviation of the noise, as a share of white.
        train_lines, val_lines, test_lines: Number of lines per split (and epoch).
    Raises:
        UserError: No word is short enough, or letters do not fit.
    """

    holds = ("image", "captions")
    name = "lines"

    def __init__(
        self,
        *,
        seed: int,
        image_size: ImageSize = (32, 128),
        longest: Count = 10,
        numbers: Rate = 0.25,
        turn: float = 5.0,
        noise: Rate = 0.1,
        train_lines: Count,
        val_lines: Count,
        test_lines: Count,
    ) -> None:
        super().__init__(seed, {"train": train_lines, "val": val_lines, "test": test_lines})
        if longest < 4:
            raise UserError(f"data.source.longest: {longest} leaves too few words for three splits; give 4 or more")
        self.shape = sides(image_size)
        widest = "W" + "m" * (longest - 1)
        if any(next(_iter_fitting_fonts(widest, font, SMALLEST, turn, self.shape), None) is None for font in FONTS):
            raise UserError(
                f"data.source.image_size: {plain(image_size)} is too small for {longest} letters turned by {turn:g} "
                "degrees; give more pixels, or a smaller data.source.longest or data.source.turn"
            )
        self.longest, self.numbers, self.turn, self.noise = longest, numbers, turn, noise

    def sample(self, keys: Keys) -> Record:
        rng = numpy_rng("line", *keys)
        text = self._text(rng)
        while key("held out", text.lower()) % 10 not in HELD_OUT[keys.split]:
            text = self._text(rng)
        turn, across, down, noise = rng.random(4).tolist()
        dark, light = int(rng.integers(0, 90)), int(rng.integers(165, 256))
        ink, paper = (dark, light) if rng.random() < 0.8 else (light, dark)
        line = Line(
            text=text,
            font=FONTS[int(rng.integers(len(FONTS)))],
            size=int(self.shape[0] * rng.uniform(*LETTERS)),
            turn=self.turn * (2 * turn - 1),
            place=(across, down),
            ink=ink,
            paper=paper,
            noise=(255 * self.noise * noise, int(rng.integers(2**31))),
            shape=self.shape,
        )
        values = {"captions": [text], "references": [text]}
        return Record(keys.id, values, partial(draw_line, line), read_stamp=lambda: str(line))

    def _text(self, rng: np.random.Generator) -> str:
        if rng.random() < self.numbers:
            return "".join(map(str, rng.integers(10, size=int(rng.integers(2, min(self.longest, 6) + 1))).tolist()))
        parts = (part for _ in range(int(rng.integers(1, 4))) for part in (ONSETS, VOWELS, CODAS))
        word = "".join(part[int(rng.integers(len(part)))] for part in parts)[: self.longest]
        return word.capitalize() if rng.random() < 0.3 else word


def draw_line(line: Line) -> Image.Image:
    """Draws a line as an RGB image."""
    high, wide = line.shape
    image = Image.new("L", (wide, high), line.paper)
    font, left, top, width, height, edge = next(
        _iter_fitting_fonts(line.text, line.font, line.size, line.turn, line.shape)
    )
    x = round(MARGIN + line.place[0] * (wide - 2 * MARGIN - width))
    y = round(edge + line.place[1] * (high - 2 * edge - height))  # at a fractional position, Pillow clips text
    ImageDraw.Draw(image).text((x - left, y - top), line.text, fill=line.ink, font=font)
    center = x + width / 2, y + height / 2
    turned = image.rotate(line.turn, Image.Resampling.BICUBIC, center=center, fillcolor=line.paper)
    spread, seed = line.noise
    pixels = np.asarray(turned, np.float32) + spread * numpy_rng("noise", seed).standard_normal(line.shape)
    return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8)).convert("RGB")


def _iter_fitting_fonts(
    text: str, name: str, size: int, turn: float, shape: tuple[int, int]
) -> Iterator[tuple[ImageFont.FreeTypeFont, float, float, float, float, float]]:
    """Yields each font size that fits, largest first, with the text's box and the margin above and below it."""
    high, wide = shape
    slope = abs(math.sin(math.radians(turn)))
    for at in range(size, SMALLEST - 1, -1):
        font = _font(name, at)
        left, top, right, bottom = font.getbbox(text)
        width, height = right - left, bottom - top
        edge = MARGIN + slope * width / 2
        if width <= wide - 2 * MARGIN and height <= high - 2 * edge:
            yield font, left, top, width, height, edge


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib  # provides the fonts

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf", size)
