"""Scenes of validation and test that their objects tell apart."""

import re

import pytest

from vlm.data.shapes.scene_captions import Shapes
from vlm.data.shapes.scene_retrieval import DistinctShapes
from vlm.errors import UserError

LOOKS = {"shapes": ["circle", "triangle", "cross"], "colors": ["red", "green", "blue", "yellow"]}
SIZES = {"sizes": ["small", "large"], "max_objects": 2, "captions_per_image": 2}
NUMBERS = {"train_scenes": 30, "val_scenes": 20, "test_scenes": 25}


def test_no_two_scenes_hold_the_same_objects():
    source, plain = (kind(seed=0, **LOOKS, **SIZES, **NUMBERS) for kind in (DistinctShapes, Shapes))
    for name in ("val", "test"):
        split = source.split(name)
        captions = [record["references"][0] for record in split.records()]
        objects = {frozenset(re.findall(r"\w+ \w+ (?:circle|triangle|cross)", caption)) for caption in captions}
        assert len(objects) == len(split) == NUMBERS[f"{name}_scenes"]
        assert split.record(0).id == plain.split(name).record(0).id  # a scene of Shapes


def test_more_scenes_than_there_are_objects_is_refused():
    with pytest.raises(UserError, match=r"data\.source\.val_scenes: only \d+ of 50 scenes have distinct objects"):
        DistinctShapes(seed=0, **LOOKS, **SIZES, **NUMBERS | {"val_scenes": 50}).split("val")
