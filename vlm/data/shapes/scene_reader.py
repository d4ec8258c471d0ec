"""Reads scenes from pixels: objects by colour and outline, without a model, to judge pictures of scenes.

Connected pixels that differ from the background are an object. It has the colour of `COLORS` that most of them are
nearest to, and the kind and centre of the drawn shape that overlaps it most.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from vlm.data.shapes.scenes import COLORS, RADII, SHAPES, Kind, Scene, SceneObject, draw_shape, radius, valid_captions

MIN_CONTRAST = (
    30  # distance of a pixel's colour from the background, in units of a channel, from which it is no part of it
)
MAX_DEVIATION = 60  # distance of an object's colour from all mixtures of its named colour and the background
MIN_PIXELS = 8  # smaller groups of pixels are no object, and as many of a wrong colour make an object unknown
MIN_OVERLAP = 0.7  # intersection over union with a drawn shape, below which a group of pixels has no known kind
SHIFT = 2  # distance in pixels up to which a shape is moved around the centre of the pixels' box


class ReadObject(NamedTuple):
    """An object in a picture.

    Args:
        placed: Its kind and centre.
        overlap: Intersection over union of its pixels with those of the drawn shape.
    """

    placed: SceneObject
    overlap: float


def read_scene(
    image: Image.Image,
    *,
    shapes: Sequence[str] = tuple(SHAPES),
    colors: Sequence[str] = tuple(COLORS),
    sizes: Sequence[str] = tuple(RADII),
) -> Scene | None:
    """Reads the objects of a square picture; None if some are of no known kind.

    Args:
        image: An RGB image whose background is its median colour.
        shapes, colors, sizes: What objects may be.
    """
    objects = read_objects(image, shapes=shapes, colors=colors, sizes=sizes)
    if any(item.overlap < MIN_OVERLAP for item in objects):
        return None
    red, green, blue = (int(value) for value in find_background(np.asarray(image)))
    return Scene(tuple(item.placed for item in objects), (red, green, blue), image.width)


def read_captions(image: Image.Image, **kinds: Sequence[str]) -> list[str]:
    """All captions that a picture shows; empty if it shows none. Arguments as in `read_scene`."""
    scene = read_scene(image, **kinds)
    return valid_captions(scene) if scene is not None and scene.objects else []


def read_objects(
    image: Image.Image, *, shapes: Sequence[str], colors: Sequence[str], sizes: Sequence[str]
) -> list[ReadObject]:
    """The objects of a picture, from the top; arguments as in `read_scene`."""
    pixels = np.asarray(image, dtype=np.float32)
    background, palette = find_background(pixels), np.array([COLORS[name] for name in colors], np.float32)
    away = pixels - background  # (H, W, 3)
    nearest = np.square(pixels[:, :, None] - palette).sum(-1).argmin(-1)  # (H, W)
    found = []
    for group in find_groups(np.square(away).sum(-1) > MIN_CONTRAST**2):
        if group.sum() < MIN_PIXELS:
            continue
        number = int(np.bincount(nearest[group], minlength=len(colors)).argmax())
        direction = palette[number] - background
        share = (away @ direction) / (direction @ direction)  # of the colour, in a mixture with the background
        deviation = np.sqrt(np.square(away - share.clip(0, 1)[..., None] * direction).sum(-1))
        is_mixture = deviation <= MAX_DEVIATION
        item = _match_shape(group & is_mixture & (share >= 0.5), colors[number], shapes, sizes)
        found.append(item if np.count_nonzero(group & ~is_mixture) < MIN_PIXELS else item._replace(overlap=0.0))
    return found


def find_background(pixels: np.ndarray) -> np.ndarray:
    """The median colour: (H, W, 3) -> (3,)."""
    return np.median(pixels.reshape(-1, 3), axis=0)


def find_groups(mask: np.ndarray) -> list[np.ndarray]:
    """The groups of pixels of a mask that are connected by their sides or corners, from the top: each bool (H, W)."""
    height, width = mask.shape
    numbers = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:  # each pixel takes the highest number around it, until no number changes
        padded = np.pad(numbers, 1)
        around = [padded[y : y + height, x : x + width] for y in range(3) for x in range(3)]
        spread = np.where(mask, np.maximum.reduce(around), 0)
        if np.array_equal(spread, numbers):
            break
        numbers = spread
    firsts = dict.fromkeys(numbers[numbers > 0].tolist())  # in the order of their topmost pixels
    return [numbers == number for number in firsts]


@cache
def _shape_mask(shape: str, radius: int) -> np.ndarray:
    """The pixels that a drawn shape covers by half or more, in its box."""
    return np.asarray(draw_shape(shape, radius)) >= 128


def _match_shape(group: np.ndarray, color: str, shapes: Sequence[str], sizes: Sequence[str]) -> ReadObject:
    """The object whose drawn shape overlaps a group of pixels most; of equal ones, the first."""
    side = len(group)
    if not group.any():
        return ReadObject(SceneObject(Kind(sizes[0], color, shapes[0]), 0, 0), 0.0)
    rows, columns = np.flatnonzero(group.any(1)), np.flatnonzero(group.any(0))
    middle = (rows[0] + rows[-1]) // 2, (columns[0] + columns[-1]) // 2
    best, most = SceneObject(Kind(sizes[0], color, shapes[0]), int(middle[1]), int(middle[0])), -1.0
    room = max(radius(size, side) for size in sizes) + SHIFT
    padded, count = np.pad(group, room), int(group.sum())
    for size in sizes:
        r = radius(size, side)
        for shape in shapes:
            mask = _shape_mask(shape, r)
            for y in range(middle[0] - SHIFT, middle[0] + SHIFT + 1):
                for x in range(middle[1] - SHIFT, middle[1] + SHIFT + 1):
                    top, left = y - r + room, x - r + room
                    shared = np.count_nonzero(padded[top : top + 2 * r + 1, left : left + 2 * r + 1] & mask)
                    overlap = shared / (count + np.count_nonzero(mask) - shared)
                    if overlap > most:
                        best, most = SceneObject(Kind(size, color, shape), int(x), int(y)), overlap
    return ReadObject(best, most)
