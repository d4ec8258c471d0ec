"""Scenes are read from their pixels as they were drawn, and pictures of no scene are not."""

import numpy as np
import pytest
from PIL import Image

from vlm.data.shapes.scene_captions import Shapes
from vlm.data.shapes.scene_reader import find_groups, read_captions, read_objects, read_scene
from vlm.data.shapes.scenes import COLORS, RADII, SHAPES, Kind, Scene, SceneObject, draw_scene, valid_captions

ALL = {"shapes": list(SHAPES), "colors": list(COLORS), "sizes": list(RADII)}
SCENES = {"train_scenes": 40, "val_scenes": 1, "test_scenes": 1}


@pytest.mark.parametrize(("side", "objects"), [(64, 3), (48, 2), (96, 3)])
def test_drawn_scenes_are_read_exactly(side: int, objects: int) -> None:
    source = Shapes(seed=1, image_size=side, max_objects=objects, captions_per_image=None, **ALL, **SCENES)  # type: ignore[arg-type]
    split = source.split("train")
    for index in range(40):
        scene = source.scene(split.keys(index))  # type: ignore[attr-defined]
        read = read_scene(draw_scene(scene))
        assert (
            read is not None and read.background == scene.background and sorted(read.objects) == sorted(scene.objects)
        )
        assert read_captions(draw_scene(scene)) == valid_captions(scene) == split.record(index)["references"]


def picture(*objects: tuple[str, int, int]) -> Image.Image:
    placed = [SceneObject(Kind(*kind.split()), x, y) for kind, x, y in objects]
    return draw_scene(Scene(tuple(placed), (60, 60, 60), 64))


RED, BLUE = ("large red circle", 16, 16), ("small blue cross", 45, 48)


def test_pictures_that_differ_from_a_caption_are_not_read_as_it() -> None:
    caption = "a large red circle above a small blue cross"
    assert caption in read_captions(picture(RED, BLUE))
    for objects in (
        [RED],  # an object is missing
        [RED, BLUE, ("small red star", 48, 12)],  # one is too many
        [("large red circle", 16, 48), ("small blue cross", 45, 12)],  # below
        [("large red circle", 16, 30), ("small blue cross", 45, 38)],  # only left of it: 8 pixels are no relation
        [("small red circle", 16, 16), BLUE],
        [("large green circle", 16, 16), BLUE],
        [("large red square", 16, 16), BLUE],
    ):
        assert caption not in read_captions(picture(*objects))


def test_unknown_objects_make_a_picture_unknown() -> None:
    blob = np.array(picture(RED, BLUE))
    blob[20:50, 30:60] = 225, 45, 45  # red, but of no known size
    assert read_scene(Image.fromarray(blob)) is None and read_captions(Image.fromarray(blob)) == []
    pink = np.array(picture(RED))
    pink[10:20, 12:20] = 255, 170, 200  # a spot of a colour between red and white
    assert read_scene(Image.fromarray(pink)) is None
    mixed = np.array(picture(RED))
    mixed[5:16, 5:28] = np.where(
        (mixed[5:16, 5:28] == (225, 45, 45)).all(-1, keepdims=True), (60, 110, 245), mixed[5:16, 5:28]
    )
    assert read_scene(Image.fromarray(mixed)) is None  # half of it blue
    speck = np.array(picture(RED, BLUE))
    speck[60:62, 2:5] = 225, 45, 45  # six pixels
    assert read_captions(Image.fromarray(speck)) == read_captions(picture(RED, BLUE))


def test_damaged_shapes_are_still_read_with_their_overlap() -> None:
    pixels = np.array(picture(RED))
    pixels[8:12, 20:27] = 60
    (item,) = read_objects(Image.fromarray(pixels), **ALL)
    assert item.placed.kind == Kind("large", "red", "circle") and 0.85 < item.overlap < 1
    blank = Image.new("RGB", (64, 64), (60, 60, 60))
    assert read_scene(blank) == Scene((), (60, 60, 60), 64) and read_captions(blank) == []


def test_groups_are_connected_by_sides_and_corners() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        mask = rng.random((9, 7)) < 0.4
        left = {(int(y), int(x)) for y, x in np.argwhere(mask)}
        expected = []
        while left:  # a flood from the topmost pixel
            group, edge = set(), [min(left)]
            while edge:
                y, x = edge.pop()
                if (y, x) in left:
                    left.remove((y, x))
                    group.add((y, x))
                    edge += [(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
            expected.append(group)
        groups = [{(int(y), int(x)) for y, x in np.argwhere(group)} for group in find_groups(mask)]
        assert groups == expected
