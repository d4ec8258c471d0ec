"""Drawn scenes with boxes: each box is that of the object's pixels, and other drawn data have not changed."""

from collections import Counter
from hashlib import sha256

import numpy as np
import pytest

from vlm.data.shapes.scene_boxes import SceneBoxes
from vlm.data.shapes.scene_captions import Shapes
from vlm.data.shapes.scene_questions import SceneConversations, SceneDifferences, SceneQuestions
from vlm.data.shapes.scenes import OVERLAP, SHAPES, Kind, Scene, SceneObject, draw_scene, find_box, radius
from vlm.errors import UserError

OPTIONS = {"seed": 3, "image_size": 64, "shapes": ["circle", "triangle", "cross"], "sizes": ["small", "large"]}
OPTIONS |= {"colors": ["red", "green", "blue", "yellow"], "train_scenes": 30, "val_scenes": 30, "test_scenes": 30}
WEIGHTS = {"max_objects": 5, "object_weights": [1, 1, 1, 1, 1]}


def make_boxes(**changes) -> SceneBoxes:
    return SceneBoxes(**OPTIONS | WEIGHTS | changes)


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", [32, 64, 97])
def test_a_box_is_that_of_the_painted_pixels(shape, size, side) -> None:
    placed = SceneObject(Kind(size, "white", shape), side // 2, side // 2 - 1)
    pixels = np.asarray(draw_scene(Scene((placed,), (0, 0, 0), side))).any(-1)
    rows, columns = np.flatnonzero(pixels.any(1)), np.flatnonzero(pixels.any(0))
    assert find_box(placed, side) == (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)


def test_scenes_have_one_to_five_objects_that_overlap_by_little() -> None:
    counts, source = Counter(), make_boxes(train_scenes=300)
    for record in source.split("train").records():
        (width, height), boxes = record["boxes"]
        assert (width, height) == record.image().size
        counts[len(boxes)] += 1
        assert all(0 <= box.box[0] < box.box[2] <= width and 0 <= box.box[1] < box.box[3] <= height for box in boxes)
        assert {box.label for box in boxes} <= {*source.classes}
    assert {*counts} == {1, 2, 3, 4, 5} and min(counts.values()) > 40
    assert len(source.classes) == 12 and source.classes == sorted(source.classes)
    keys = [source.open("train").keys(index) for index in range(100)]
    overlaps = []
    for scene in map(source.scene, keys):
        for at, one in enumerate(scene.objects):
            for other in scene.objects[:at]:
                radii = radius(one.kind.size, 64) + radius(other.kind.size, 64)
                overlaps.append(1 - max(abs(one.x - other.x), abs(one.y - other.y)) / radii)
    assert max(overlaps) <= OVERLAP + 0.05  # of the grid, where random places failed


def test_splits_share_no_combination_and_are_the_same_again() -> None:
    source = make_boxes()
    sets = {
        name: {tuple(sorted(map(str, source.scene(source.open(name).keys(index)).objects))) for index in range(30)}
        for name in source.splits
    }
    assert not sets["train"] & sets["test"] and not sets["val"] & sets["test"]
    first, second = (make_boxes().split("test").record(7) for _ in range(2))
    assert first["boxes"] == second["boxes"] and first.image().tobytes() == second.image().tobytes()


@pytest.mark.parametrize(("most", "weights"), [(1, [1] * 5), (6, [1] * 6), (5, [1, 1, 1])])
def test_numbers_of_objects_that_cannot_be_drawn_are_refused(most, weights) -> None:
    with pytest.raises(UserError, match=r"max_objects: \d is invalid; give 2 to 5|object_weights: .* give 5 numbers"):
        make_boxes(max_objects=most, object_weights=weights)
    with pytest.raises(UserError, match="max_objects: 4 is invalid; give 2 or 3"):
        Shapes(**OPTIONS, max_objects=4, captions_per_image=2)


# Of what was drawn before there were boxes.
DIGESTS = {"Shapes": "7cc36b3234f994e5", "SceneQuestions": "27f520de6fe5de1b", "SceneDifferences": "9ba7cd7665c4036a"}
DIGESTS["SceneConversations"] = "6788f6093289c5ed"


@pytest.mark.parametrize("kind", [Shapes, SceneQuestions, SceneDifferences, SceneConversations])
def test_other_drawn_data_are_bit_identical(kind) -> None:
    more = {"captions_per_image": 2} if kind is Shapes else {}
    source, digest = kind(**OPTIONS, max_objects=3, object_weights=[1, 2, 1], **more), sha256()
    for name in source.splits:
        for index in range(20):
            record = source.split(name).record(index, 1)
            values = sorted((key, str(value)) for key, value in record.values.items())
            digest.update(repr((record.id, values)).encode())
            for image in record.images():
                digest.update(image.tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[kind.__name__]
