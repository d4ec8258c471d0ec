"""Pictures of images with the boxes of their objects."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from PIL import Image, ImageDraw

from vlm.data.images.image import ImageError, load_image
from vlm.data.images.resize import Box
from vlm.errors import UserError, printable
from vlm.inference.attention.pictures import load_font, picture_name
from vlm.inference.use import Outcome
from vlm.io.output import Record, output_folder
from vlm.tasks.detection.predict import DetectedObject

SIDE = 320  # smallest shorter side of a picture in pixels, so that labels of small images can be read
LETTERS = 27  # shorter side of a large picture in heights of letters; those of a small one have MIN_LETTERS pixels
MIN_LETTERS = 14
HUES = ("#ff5a5a", "#3ddc84", "#5aa9ff", "#ffd23d", "#d27bff", "#ff9f40", "#40e0d0", "#ffffff")
TRUE = "#bbbbbb"  # colour of the true boxes


def draw_objects(
    image: Image.Image,
    objects: Sequence[DetectedObject],
    truth: Sequence[Box] = (),
    *,
    with_scores: bool = True,
    longest: int | None = None,
) -> Image.Image:
    """Draws the boxes of objects with class and score on a copy of an image, which is enlarged if it is small.

    Args:
        image: An RGB image.
        objects: Its objects; those of a class have the same colour.
        truth: True boxes, drawn as thin grey lines.
        longest: Longest side of the picture in pixels; None for any. Larger images are reduced before boxes are drawn.
    """
    factor = max(1.0, SIDE / min(image.size))
    if longest is not None:
        factor = min(factor, longest / max(image.size))
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    picture = image.copy() if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
    scale = size[0] / image.width, size[1] / image.height
    height = max(MIN_LETTERS, min(size) // LETTERS)
    draw, letters, pen = ImageDraw.Draw(picture), load_font(height), max(1, height // 12)
    for box in truth:
        draw.rectangle(_scale(box, scale), outline=TRUE, width=pen)
    for item in reversed(objects):  # the most confident last, on top
        color = HUES[blake2b(item.label.encode(), digest_size=1).digest()[0] % len(HUES)]
        left, top, right, bottom = _scale(item.box, scale)
        draw.rectangle((left, top, right, bottom), outline=color, width=2 * pen)
        label = printable(item.label) + (f" {item.score:.0%}" if with_scores else "")
        wide, high = draw.textlength(label, font=letters) + 4 * pen, height * 5 / 4
        x = min(left, max(0, size[0] - wide))
        y = top - high if top >= high else min(bottom, size[1] - high)
        draw.rectangle((x, y, x + wide, y + high), fill=color)
        draw.text((x + 2 * pen, y + high / 2), label, fill="black", font=letters, anchor="lm")
    return picture


def _scale(box: Box, scale: tuple[float, float]) -> Box:
    """The outermost pixels of a box in a picture, given its size relative to the image."""
    left, top, right, bottom = (edge * scale[at % 2] for at, edge in enumerate(box))
    return left, top, max(left, right - 1), max(top, bottom - 1)


class PictureFolder:
    """Writes the picture of each image; an observer for `write_results`.

    Args:
        folder: The folder of the pictures; created if missing.
    Raises:
        UserError: The folder cannot be created or written to.
    """

    def __init__(self, folder: str) -> None:
        self.folder = output_folder(folder, option="--draw")

    def __call__(self, outcome: Outcome) -> Sequence[Record]:
        path = str(outcome.source[0])
        try:
            image = load_image(path)
        except ImageError:  # deleted since its objects were detected
            return ()
        file: Path = self.folder / picture_name(path)
        try:
            draw_objects(image, outcome.result.objects).save(file)
        except OSError as fault:
            reason = f"cannot be written ({fault.strerror})"
            raise UserError(f"--draw {file}: {reason}; choose another folder", 1) from fault
        return ()
