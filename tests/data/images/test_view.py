"""Boxes in views of images: painted pixels are found where the view says, whatever the crop, border and mirror."""

import numpy as np
import pytest
from PIL import Image

from vlm.data.images.augment import Augment
from vlm.data.images.image import Preprocess
from vlm.data.images.view import View

AUGMENTS = [
    {},
    {"horizontal_flip": True},
    {"min_scale": 0.3, "min_ratio": 0.6, "horizontal_flip": True},
    {"min_scale": 0.5, "color_jitter": 0.2},
]
GEOMETRIES = [
    {"resize": "crop", "crop": 0.875},
    {"resize": "crop_down"},
    {"resize": "squash", "crop": 0.9},
    {"resize": "pad"},
    {"resize": "pad", "interpolation": "lanczos"},
]


def paint(width: int, height: int, box: tuple[int, int, int, int]) -> Image.Image:
    """A black image with a red box."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[box[1] : box[3], box[0] : box[2]] = (255, 0, 0)
    return Image.fromarray(pixels)


def find_painted(pixels: np.ndarray) -> tuple[float, float, float, float]:
    """The edges of what is red, to a pixel; a grey border is not. Shapes: (3, H, W)"""
    red = pixels[0].astype(float) - pixels[1]
    rows, columns = red.max(1) / red.max(), red.max(0) / red.max()
    edges = []
    for line in (columns, rows):
        inside = np.flatnonzero(line > 0.5)
        edges.append((inside[0], inside[-1] + 1))
    return edges[0][0], edges[1][0], edges[0][1], edges[1][1]


def check(pixels: np.ndarray, view: View, box: tuple[int, int, int, int]) -> None:
    assert pixels.shape[:0:-1] == view.size
    clipped = view.clip_box(view.map_box(box))
    assert np.allclose(view.unmap_box(view.map_box(box)), box)
    if min(clipped[2] - clipped[0], clipped[3] - clipped[1]) < 3:  # too little is seen to be found
        return
    found = find_painted(pixels)
    assert np.abs(np.subtract(found, clipped)).max() <= 1.01, (found, clipped)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("shape", [(48, 48), (32, 56)])
def test_a_painted_box_is_where_the_view_of_evaluation_says(geometry, shape) -> None:
    rng = np.random.default_rng(0)
    for _ in range(12):
        width, height = (int(side) for side in rng.integers(60, 160, 2))
        left, top = int(rng.integers(0, width - 40)), int(rng.integers(0, height - 40))
        box = left, top, left + int(rng.integers(20, 40)), top + int(rng.integers(20, 40))
        preprocess = Preprocess(image_size=shape, **geometry)
        view = preprocess.view((width, height))
        check(preprocess(paint(width, height, box)).numpy(), view, box)


@pytest.mark.parametrize("augment", AUGMENTS, ids=str)
@pytest.mark.parametrize("resize", ["crop", "squash", "pad"])
def test_a_painted_box_is_where_the_view_of_an_augmentation_says(augment, resize) -> None:
    rng, mirrored = np.random.default_rng(1), set()
    augmentation = Augment(image_size=(48, 40), resize=resize, **augment)
    for index in range(24):
        width, height = (int(side) for side in rng.integers(60, 160, 2))
        left, top = int(rng.integers(0, width - 40)), int(rng.integers(0, height - 40))
        box, key = (left, top, left + 36, top + 30), (0, 3, index)
        view = augmentation.view((width, height), key)
        mirrored.add(view.mirrored)
        check(augmentation(paint(width, height, box), key).numpy(), view, box)
    assert mirrored == ({False, True} if augment.get("horizontal_flip") else {False})


def test_an_image_that_is_resized_by_its_longest_edge_first() -> None:
    preprocess = Preprocess(image_size=64, resize="squash", longest_edge=128)
    view, box = preprocess.view((90, 60)), (10, 20, 50, 55)
    check(preprocess(paint(90, 60, box)).numpy(), view, box)
    assert np.allclose(view.map_box((0, 0, 90, 60)), (0, 0, 64, 64))
