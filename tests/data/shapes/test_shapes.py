"""The drawn data set: its scenes are read back from their pixels, and its captions checked by a parser written here."""

import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlm.data.shapes import scenes
from vlm.data.shapes.scene_captions import DistinctShapes, Shapes, main
from vlm.data.shapes.scene_source import GeneratedSplit
from vlm.data.shapes.scenes import COLORS, RADII, SHAPES, Kind, Scene, SceneObject, place_objects, valid_captions
from vlm.errors import UserError
from vlm.randomness import numpy_rng

SPLITS = ("train", "val", "test")


def shapes(kind=Shapes, **changes) -> Shapes:
    given = {"shapes": ["circle", "square", "triangle"], "colors": ["red", "green", "blue", "yellow"], "seed": 0}
    given |= {"sizes": ["small", "large"], "train_scenes": 50, "val_scenes": 20, "test_scenes": 20}
    return kind(**given | {"captions_per_image": 5} | changes)


def is_valid(caption: str, objects: dict[str, tuple[float, float]], clear: float) -> bool:
    """Parses a caption and holds it against where each named thing is, (x, y) with y down, and how far is clear."""
    noun = r"a (\w+ \w+ \w+)"
    clause = rf"(left of|right of|above|below) {noun}"
    if not (parsed := re.fullmatch(rf"{noun}(?: {clause}(?: and {clause})?)?", caption)):
        return False
    subject, *rest = [group for group in parsed.groups() if group is not None]
    if sorted([subject, *rest[1::2]]) != sorted(objects):
        return False
    x, y = objects[subject]
    for relation, other in zip(rest[::2], rest[1::2], strict=True):
        u, v = objects[other]
        if {"left of": u - x, "right of": x - u, "above": v - y, "below": y - v}[relation] < clear:
            return False
    return True


def places_of(scene: Scene) -> dict[str, tuple[float, float]]:
    return {f"{kind.size} {kind.color} {kind.shape}": (x, y) for kind, x, y in scene.objects}


def clear_distance(image_size: int) -> float:
    """A fifth of the side, a little more for the gap: written apart from `margin`, which must not be less."""
    return 0.2 * image_size + 1


def pieces(image: Image.Image) -> list[np.ndarray]:
    """The pixels (row, column) of each connected patch, diagonals included, that is not the background's colour."""
    pixels = np.asarray(image).astype(int)
    corners = [tuple(pixels[y, x]) for y in (0, -1) for x in (0, -1)]
    left = set(map(tuple, np.argwhere((pixels != max(corners, key=corners.count)).any(-1)).tolist()))
    found = []
    while left:
        todo, piece = [left.pop()], []
        while todo:
            y, x = todo.pop()
            piece.append((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            todo += near
        found.append(np.array(piece))
    return found


def read(image: Image.Image) -> dict[str, tuple[float, float]]:
    """What stands where, from nothing but the pixels: colour by hue, size by width, shape by how full its box is."""
    seen = {}
    for piece in pieces(image):
        (top, left), (bottom, right) = piece.min(0), piece.max(0)
        width, height = right - left + 1, bottom - top + 1
        x, y = (left + right) / 2, (top + bottom) / 2
        r, g, b = image.getpixel((round(x), round(y)))
        color = "blue" if b > max(r, g) else "yellow" if min(r, g) > 2 * b else "red" if r > g else "green"
        size = "large" if width > 0.26 * image.width else "small"
        full = len(piece) / (width * height)
        seen[f"{size} {color} {'square' if full > 0.95 else 'circle' if full > 0.7 else 'triangle'}"] = (x, y)
    return seen


def combination(scene: Scene) -> tuple[Kind, ...]:
    return tuple(sorted(thing.kind for thing in scene.objects))


def scene_of(split: GeneratedSplit, epoch: int, index: int) -> Scene:
    return split.source.scene(split.keys(index, epoch))


def draw_scenes(split: GeneratedSplit, count: int) -> list[Scene]:
    return [scene_of(split, epoch, index) for epoch in range(2) for index in range(count // 2)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_splits_share_no_combination_and_train_shows_every_kind(seed):
    source = shapes(seed=seed)
    train, val, test = ({combination(scene) for scene in draw_scenes(source.split(name), 3000)} for name in SPLITS)
    assert not train & val and not train & test and not val & test
    assert {kind for kinds in train for kind in kinds} == set(source.kinds) and len(source.kinds) == 24
    assert all({len(kinds) for kinds in seen} == {1, 2, 3} for seen in (train, val, test))
    # 24 kinds have 24 + 276 + 2024 combinations, and a tenth of them is 231; of these 1500 scenes show most.
    assert 150 < len(val) <= 231 and 150 < len(test) <= 231 and len(train) > 800


@pytest.mark.parametrize("names", [["circle", "star"], ["circle", "star", "cross"]])
def test_every_kind_is_in_train_where_there_are_hardly_enough_kinds(names):
    colors = ["white", "cyan"][: 4 // len(names)]
    for seed in range(8):
        source = shapes(seed=seed, shapes=names, colors=colors, sizes=["large"], max_objects=2)
        train, val, test = ({combination(scene) for scene in draw_scenes(source.split(name), 100)} for name in SPLITS)
        assert len({kind for kinds in train for kind in kinds}) == len(names) * len(colors)
        assert val and test and not val & test and not train & (val | test)


def test_frequencies_follow_the_weights():
    counts = Counter(len(scene.objects) for scene in draw_scenes(shapes(object_weights=[1, 2, 5]).split("train"), 4000))
    assert [counts[number] / 4000 for number in range(4)] == pytest.approx([0, 1 / 8, 2 / 8, 5 / 8], abs=0.03)
    assert {len(scene.objects) for scene in draw_scenes(shapes(max_objects=2).split("train"), 200)} == {1, 2}


@pytest.mark.parametrize("name, image_size", [("train", 64), ("val", 32), ("test", 48)])
def test_valid_captions_are_all_the_true_ones(name, image_size):
    """Of every sentence that there is over the kinds of a scene, told true from false by the parser alone."""
    relations = ("left of", "right of", "above", "below")
    for scene in draw_scenes(shapes(image_size=image_size).split(name), 80):
        objects = places_of(scene)
        sentences = {f"a {one}" for one in objects}
        sentences |= {f"a {one} {said} a {two}" for one in objects for said in relations for two in objects}
        longer = {f"{sentence} and {said} a {one}" for sentence in sentences for said in relations for one in objects}
        true = {text for text in sentences | longer if is_valid(text, objects, clear_distance(image_size))}
        assert sorted(true) == valid_captions(scene)


def test_a_scene_made_by_hand_says_what_a_person_would():
    red, blue, green = Kind("small", "red", "circle"), Kind("large", "blue", "square"), Kind("small", "green", "star")
    two = Scene((SceneObject(red, 10, 30), SceneObject(blue, 50, 31)), (0, 0, 0), 64)
    assert valid_captions(two) == [
        "a large blue square right of a small red circle",
        "a small red circle left of a large blue square",
    ]
    three = valid_captions(Scene((*two.objects, SceneObject(green, 10, 55)), (0, 0, 0), 64))
    assert "a small red circle left of a large blue square and above a small green star" in three
    assert "a large blue square right of a small green star and above a small green star" not in three
    # Two orders each of: the circle, with one relation to either; the square and the star, with two to each other.
    assert len(three) == 2 * (1 * 1 + 1 * 2 + 1 * 2)


@pytest.mark.parametrize("name", SPLITS)
def test_the_picture_shows_what_the_captions_say(name):
    split = shapes(image_size=128, captions_per_image=None).split(name)
    for index in range(25):
        seen, captions = read(split.record(index, 1).image()), split.record(index, 1)["captions"]
        # Half a pixel for a box read from smooth edges, and the triangle, whose box ends above its lower edge.
        assert captions and all(is_valid(text, seen, clear_distance(128) - 2) for text in captions), (seen, captions)


@pytest.mark.parametrize("image_size", [32, 48, 64])
def test_objects_never_touch_nor_leave_the_canvas_and_sizes_are_clearly_different(image_size):
    source = shapes(image_size=image_size, shapes=list(SHAPES), colors=list(COLORS)[:2], object_weights=[0, 1, 3])
    split = source.split("train")
    areas: dict[Kind, set[int]] = {}
    for index in range(100):
        scene, found = scene_of(split, 0, index), pieces(split.record(index).image())
        assert len(found) == len(scene.objects)
        at = {(y, x): kind for kind, x, y in scene.objects}
        for piece in found:
            (inside,) = (kind for centre, kind in at.items() if centre in set(map(tuple, piece.tolist())))
            areas.setdefault(inside, set()).add(len(piece))
    # A shape that were cut off by the border somewhere would have fewer pixels there.
    assert len(areas) > 12 and all(len(area) == 1 for area in areas.values())
    small = [kind for kind in areas if kind.size == "small" and kind._replace(size="large") in areas]
    assert len(small) > 4
    assert all(min(areas[kind._replace(size="large")]) > 1.8 * min(areas[kind]) for kind in small)


@pytest.mark.parametrize("attempts", [0, 40])
@pytest.mark.parametrize("image_size", [32, 48, 64, 1000])
def test_three_objects_always_fit_in_no_doubtful_relation(image_size, attempts, monkeypatch):
    monkeypatch.setattr(scenes, "ATTEMPTS", attempts)
    for sizes in (("large",) * 3, ("small",) * 3, ("large", "large", "small"), ("large", "small", "small")):
        kinds = tuple(Kind(size, color, "circle") for size, color in zip(sizes, COLORS, strict=False))
        for index in range(50):
            placed = place_objects(kinds, image_size, numpy_rng(index))
            assert [thing.kind for thing in placed] == list(kinds)
            for thing in placed:
                reach = RADII[thing.kind.size] * image_size - 0.5
                assert reach <= min(thing.x, thing.y) and max(thing.x, thing.y) <= image_size - 1 - reach
            for one, two in combinations(placed, 2):
                apart = (RADII[one.kind.size] + RADII[two.kind.size]) * image_size
                along = (abs(one.x - two.x), abs(one.y - two.y))
                assert max(along) > apart
                assert all(not 0.17 * image_size < distance < 0.2 * image_size for distance in along)


def test_captions_are_some_of_the_references_and_not_always_the_same():
    source = shapes(object_weights=[1, 1, 3], captions_per_image=4)
    for record in [record for name in SPLITS for record in source.split(name).records(20)]:
        captions, references = record["captions"], record["references"]
        assert len(captions) == len(set(captions)) == min(4, len(references)) and set(captions) <= set(references)
    everything = shapes(captions_per_image=None).split("val")
    assert all(record["captions"] == record["references"] for record in everything.records(20))
    one = shapes(object_weights=[0, 0, 1], captions_per_image=1).split("train")
    assert len({record["references"].index(record["captions"][0]) for record in one.records()}) > 4


def test_captions_draw_no_pixels(monkeypatch):
    drawn = []
    monkeypatch.setattr("vlm.data.shapes.scene_source.draw_scene", drawn.append)
    record = shapes().split("train").record(0)
    assert record["captions"] and record["references"] and drawn == []
    record.image()
    assert len(drawn) == 1


def test_no_two_distinct_scenes_hold_the_same_objects():
    numbers = {"max_objects": 2, "val_scenes": 20, "test_scenes": 25}
    plain = shapes(**numbers)
    source = shapes(DistinctShapes, **numbers)
    for name, count in (("val", 20), ("test", 25)):
        split = source.split(name)
        objects = {
            frozenset(re.findall(r"\w+ \w+ (?:circle|triangle|square)", r["references"][0])) for r in split.records()
        }
        assert len(objects) == len(split) == count
        assert split.record(0).id == plain.split(name).record(0).id  # a scene of Shapes
    with pytest.raises(UserError, match=r"data\.source\.val_scenes: only \d+ of 50 scenes have distinct objects"):
        shapes(DistinctShapes, **numbers | {"val_scenes": 50}).split("val")


def test_the_shipped_sample_is_what_the_code_writes(tmp_path):
    shipped, folder = Path(__file__).parents[3] / "data" / "sample", tmp_path / "new" / "folder"
    assert main([str(folder), "--image-size", "128"]) == 0
    assert (folder / "captions.json").read_bytes() == (shipped / "captions.json").read_bytes()
    names = sorted(path.name for path in folder.glob("*.png"))
    assert names == sorted(path.name for path in shipped.glob("*.png")) and len(names) == 6
    for name in names:
        with Image.open(folder / name) as new, Image.open(shipped / name) as old:
            # A release of Pillow may round an edge differently; the picture is the same.
            assert np.abs(np.asarray(new).astype(int) - np.asarray(old)).max() <= 8


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"shapes": ["circle", "sqare"]}, "data.source.shapes: unknown 'sqare'; choose from circle, square"),
        ({"colors": ["pink"]}, "data.source.colors: unknown 'pink'"),
        ({"sizes": ["medium"]}, "data.source.sizes: unknown 'medium'; choose from small, large"),
        ({"sizes": []}, "data.source.sizes: is empty"),
        ({"colors": ["red", "red"]}, "data.source.colors: a name is repeated"),
        ({"image_size": 16}, "data.source.image_size: 16 is too small; give at least 32"),
        ({"max_objects": 4}, "data.source.max_objects: 4"),
        ({"max_objects": 1}, "data.source.max_objects: 1"),
        ({"object_weights": [1, 1]}, "data.source.object_weights: [1, 1]"),
        ({"object_weights": [1, -1, 3]}, "data.source.object_weights"),
        ({"object_weights": [1, 0, 0]}, "data.source.object_weights"),
        ({"colors": ["red"], "sizes": ["small"], "object_weights": [0, 1, 1]}, "3 kinds of object are too few"),
        ({"colors": ["red"], "sizes": ["small"], "shapes": ["star"]}, "1 kinds of object are too few"),
    ],
)
def test_wrong_settings_are_told_by_their_key(changes, told):
    with pytest.raises(UserError, match=re.escape(told)):
        shapes(**changes)


def test_main_tells_faults_in_a_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 1
    assert main([str(tmp_path), "--count", "0"]) == 2
    assert main([str(tmp_path), "--image-size", "8"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
