"""Scenes of validation and test that captions tell apart."""

import pytest

from vlm.data.shapes.scene_captions import Shapes
from vlm.data.shapes.scene_retrieval import DistinctShapes
from vlm.errors import UserError

LOOKS = {"shapes": ["circle", "triangle", "cross"], "colors": ["red", "green", "blue", "yellow"]}
SIZES = {"sizes": ["small", "large"], "max_objects": 2, "captions_per_image": 2}
RELATIONS = {"left", "right", "above", "below", "of"}
NUMBERS = {"train_scenes": 30, "val_scenes": 40, "test_scenes": 60}


def test_no_caption_is_true_of_two_scenes():
    source, plain = (kind(seed=0, **LOOKS, **SIZES, **NUMBERS) for kind in (DistinctShapes, Shapes))
    for name in ("val", "test"):
        split = source.split(name)
        assert len(split) == NUMBERS[f"{name}_scenes"]
        captions = [caption for record in split.records() for caption in record["references"]]
        assert len(captions) == len(set(captions))
        objects = {frozenset(record["references"][0].split()) - RELATIONS for record in split.records()}
        assert len(objects) < len(split)  # scenes of the same objects are among them
        assert split.record(3).id == split.record(3, epoch=2).id
        ids = {record.id for record in plain.split(name).records()}
        assert split.record(0).id in ids  # a scene of Shapes
    assert source.split("train").fresh and len(source.split("train")) == 30


def test_more_scenes_than_there_are_meanings_is_refused():
    with pytest.raises(UserError, match=r"data\.source\.val_scenes: only \d+ of 500 scenes have no caption in common"):
        DistinctShapes(seed=0, **LOOKS, **SIZES, **NUMBERS | {"val_scenes": 500}).split("val")
