"""Pictures of attention: of a captioner's words over the image, and of a translation's words."""

import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vlm.data.images.image import ImageError, load_image
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import UserError, printable
from vlm.inference.attention.maps import Map, has_class_token, list_missing_maps, read_attention
from vlm.inference.predictor import normalize_pixels
from vlm.inference.use import Outcome
from vlm.inference.writing import Text, split_words
from vlm.models.context import Context
from vlm.models.decoder import TextDecoder
from vlm.nn.image_size import fit_longest_side

TILE, GAP = 128, 20  # pixels of a tile's longer side, and of the space above it for its word
GLOW = np.array([110.0, 75.0, 10.0])  # colour added at the largest weight
Band = tuple[str, Sequence[Map]]


def draw_bands(pixels: Tensor, bands: Sequence[Band], *, columns: int = 6) -> bytes:
    """Draws a PNG of bands of pictures, each under its title; the first begins with the image itself.

    A picture is a copy of the image that is bright where the model attended for a word.

    Args:
        pixels: uint8 (3, H, W).
    """
    image = pixels.permute(1, 2, 0).cpu().numpy()  # (H, W, 3)
    high, wide = fit_longest_side(image.shape[:2], TILE)
    letters, lines = load_font(14), list[str | list[tuple[str, np.ndarray | None]]]()  # titles and rows of pictures
    for number, (title, maps) in enumerate(bands):
        lines += [title] if title else []
        tiles: list[tuple[str, np.ndarray | None]] = [*([("", None)] if number == 0 else []), *maps]
        lines += [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
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
            x = GAP + place * (wide + GAP)
            tile = Image.fromarray(image if weights is None else _overlay_weights(image, weights))
            sheet.paste(tile.resize((wide, high), Image.Resampling.LANCZOS), (x, top + GAP))
            draw.text((x + wide // 2, top + GAP // 2), printable(word), fill="black", font=letters, anchor="mm")
        top += high + 2 * GAP
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()


def load_font(size: int) -> ImageFont.FreeTypeFont:
    """Returns DejaVu Sans, which covers many scripts; matplotlib ships it."""
    package = find_spec("matplotlib")
    assert package is not None and package.origin is not None
    return ImageFont.truetype(Path(package.origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf", size)


def _overlay_weights(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Darkens an image where weights are small; adds a warm glow where they are large, to show on dark images too."""
    light = Image.fromarray((255 * weights / max(float(weights.max()), 1e-12)).astype(np.uint8))
    heat = np.asarray(light.resize((image.shape[1], image.shape[0]), Image.Resampling.BICUBIC))[..., None] / 255
    return (image * (0.2 + 0.6 * heat) + GLOW * heat).clip(0, 255).astype(np.uint8)


CELL, LETTER = 26, 9  # pixels of a cell for a pair of words, and approximately of a letter


@dataclass
class Alignment:
    """The words of both texts and their weights (Bahdanau et al. 2015, figure 3): (translation, source).

    A row of weights sums to at most 1; the rest is on the begin and end tokens.
    """

    source: list[str]
    translation: list[str]
    weights: np.ndarray


@torch.no_grad()
def read_alignment(
    decoder: TextDecoder, tokenizer: Tokenizer, context: Context, source: Sequence[int], translation: Sequence[int]
) -> Alignment | None:
    """Decodes a translation again and records its attention.

    Returns None for a decoder without attention, or if a text has no word.

    Args:
        context: The source text, encoded, one row.
        source: Its tokens, with begin and end.
        translation: Tokens of the translation, without begin and end.
    """
    row = torch.tensor([[tokenizer.bos_id, *translation[:-1]]], device=context.states.device)
    if not translation or (weights := decoder.attention(row, context)) is None:
        return None
    by_token = weights[0].float().cpu().numpy()  # (L, S)
    inner = [place for place, token in enumerate(source) if token not in (tokenizer.bos_id, tokenizer.eos_id)]
    columns = [
        (word, [inner[at] for at in places]) for word, places in split_words([source[at] for at in inner], tokenizer)
    ]
    rows = list(split_words(translation, tokenizer))
    if not rows or not columns:
        return None
    means = [[by_token[at][:, places].sum(1).mean() for _, places in columns] for _, at in rows]
    return Alignment([word for word, _ in columns], [word for word, _ in rows], np.array(means))


def draw_alignment(alignment: Alignment) -> bytes:
    """Draws a PNG: dark for large weights, translation from top to bottom, source from left to right."""
    label_width, label_height = (
        LETTER * max(map(len, words)) + GAP for words in (alignment.translation, alignment.source)
    )
    size = (label_width + CELL * len(alignment.source) + GAP, label_height + CELL * len(alignment.translation) + GAP)
    sheet, letters = Image.new("RGB", size, "white"), load_font(14)
    draw = ImageDraw.Draw(sheet)
    for column, word in enumerate(alignment.source):
        strip = Image.new("RGB", (label_height - GAP // 2, CELL), "white")
        ImageDraw.Draw(strip).text((0, CELL // 2), printable(word), fill="black", font=letters, anchor="lm")
        sheet.paste(strip.rotate(90, expand=True), (label_width + CELL * column, 0))
    for row, (word, weights) in enumerate(zip(alignment.translation, alignment.weights, strict=True)):
        y = label_height + CELL * row
        draw.text((label_width - GAP // 2, y + CELL // 2), printable(word), fill="black", font=letters, anchor="rm")
        for column, weight in enumerate(weights):
            x, shade = label_width + CELL * column, int(255 * (1 - min(1.0, float(weight))))
            draw.rectangle((x, y, x + CELL - 1, y + CELL - 1), fill=(shade, shade, shade), outline="#dddddd")
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()


BY_CLASS = "encoder, last layer: attention of the class token, per head"
BY_PATCHES = "encoder, last layer: mean attention of the patches, per head (it has no class token)"


class AttentionPicture:
    """A picture of the attention over an image for each word of its caption; a notebook shows it.

    Args:
        caption: The caption, as `vlm.inference.writing.Text`.
        png: The bytes of the PNG file.
    """

    def __init__(self, caption: Text, png: bytes) -> None:
        self.caption, self.png = caption, png

    def _repr_png_(self) -> bytes:
        return self.png

    def show(self) -> None:
        """Shows the picture: in a notebook below its cell, else in the system's viewer of images."""
        ipython = sys.modules.get("IPython")  # other libraries import it too, but only a notebook's shell has a kernel
        if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
            ipython.display.display(self)
        else:
            Image.open(BytesIO(self.png)).show()

    def save(self, path: str | Path) -> None:
        """Writes the picture, a PNG, to a file."""
        Path(path).write_bytes(self.png)


class AttentionDrawing:
    """Draws pictures of a captioner's attention.

    Attributes:
        missing: Lines that say which maps the model does not offer.
    Args:
        captioner: The predictor.
        named: The option or method that asks for pictures, for messages.
    Raises:
        UserError: This model offers no attention maps.
    """

    def __init__(self, captioner: Any, named: str) -> None:
        self.captioner = captioner
        if captioner.form is not None:
            raise UserError(f"{named}: not supported for models that read images inside a prompt; remove it")
        blank = captioner.pixels(Image.new("RGB", (1, 1)))[None].to(captioner.device)
        self.missing = list_missing_maps(
            captioner.model, normalize_pixels(captioner.model, captioner.preprocess, blank)
        )
        if len(self.missing) > 1:
            raise UserError(f"{named}: {'; '.join(self.missing)}; remove it for this model")
        self.title = BY_CLASS if has_class_token(captioner.model.encoder) else BY_PATCHES
        # The image as the model sees it, at a higher resolution.
        self.view = captioner.preprocess.scaled_to(TILE)

    def png(self, pixels: Tensor, caption: Text, view: Tensor) -> bytes:
        """The picture of a caption.

        Args:
            pixels: The image as the model reads it, uint8 (3, H, W).
            caption: Its text and tokens.
            shown: The image as it is shown, from `view`.
        """
        it = self.captioner
        attention = read_attention(it.model, it.tokenizer, it.preprocess, pixels.to(it.device), caption.tokens)
        bands: list[Band] = [(caption.text, attention.words)]
        bands += [(self.title, attention.heads)] if attention.heads else []
        return draw_bands(view, bands)


class AttentionFolder:
    """Draws the attention of each caption; an observer for `write_results`.

    A picture is complete before its caption is written, so that the records of a killed run have all their pictures.

    Args:
        folder: The folder of the pictures; created if missing.
    Raises:
        UserError: The folder cannot be created, or this model offers no attention maps.
    """

    def __init__(self, captioner: Any, folder: str) -> None:
        self.folder = Path(folder)
        self.drawing = AttentionDrawing(captioner, f"--attention {folder}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise _write_error(self.folder, fault, 2) from fault
        for line in self.drawing.missing:
            print(f"--attention: {line}", file=sys.stderr)

    def __call__(self, outcome: Outcome) -> list[dict[str, str]]:
        path, pixels, names = str(outcome.source), outcome.value, []
        try:
            view = self.drawing.view(load_image(path))
        except ImageError:  # deleted since it was captioned
            view = pixels
        for rank, caption in enumerate(outcome.result, start=1):
            name = picture_name(path, rank)
            self._write(name, self.drawing.png(pixels, caption, view))
            names.append({"attention": str(self.folder / name)})
        return names

    def _write(self, name: str, png: bytes) -> None:
        part = self.folder / f".{name}.part"
        try:
            part.write_bytes(png)
            part.replace(self.folder / name)
        except OSError as fault:
            raise _write_error(self.folder / name, fault, 1) from fault


def picture_name(path: str, rank: int = 1) -> str:
    """The file name of an image's picture: safe and unique for its path."""
    stem = re.sub(r"[^\w.-]", "_", Path(path).stem).lstrip(".")[:40] or "image"
    digest = blake2b(os.fsencode(path), digest_size=4).hexdigest()
    return f"{stem}-{digest}{f'-{rank}' if rank > 1 else ''}.png"


def _write_error(path: Path, fault: OSError, status: int) -> UserError:
    return UserError(f"--attention {path}: cannot be written ({fault.strerror}); choose another folder", status)
