"""Every source of images tells when one of its images changes."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from captioned import captions, picture
from classed import lay_out, pack
from sharded import captioned, write_tar

from vlm.data.features import find_augment_problem
from vlm.data.images.class_augment import ClassAugment
from vlm.data.records import SplitSubset
from vlm.data.shapes.scene_captions import Shapes
from vlm.data.shapes.scene_labels import ShapeClasses
from vlm.data.sources import torchvision_sets
from vlm.data.sources.class_folders import ClassFolders
from vlm.data.sources.shards import Shards

DRAWN = {"shapes": ["circle", "cross"], "colors": ["red", "blue"], "sizes": ["small", "large"]}
DRAWN |= {"train_scenes": 4, "val_scenes": 2, "test_scenes": 2}


def written(path, second):
    """Sets the time at which a file was written."""
    os.utime(path, ns=(0, second * 10**9))


def files(root, seed):
    for name, second in (("b.png", 0), ("a.png", seed)):
        picture(root / name)
        written(root / name, second)
    return captions(root, "image,caption,split\nb.png,b,train\na.png,a,train\n").split("train")


def folder(root, seed):
    lay_out(root, "train/x/b.png", "train/y/a.png", "val/x/c.png", "val/y/d.png")
    for name, second in (("x/b.png", 0), ("y/a.png", seed)):
        written(root / "train" / name, second)
    return ClassFolders(root=str(root)).split("train")


def tar(root, seed):
    folder(root / "files", 0)
    written(pack(root / "all.tar", root / "files"), seed)
    return ClassFolders(path=str(root / "all.tar")).split("train")


def shards(root, seed):
    written(write_tar(root / "train/0.tar", captioned(2)), seed)
    return Shards(root=str(root)).split("train")


def shapes(root, seed):
    return Shapes(seed=seed, image_size=48, max_objects=2, captions_per_image=1, **DRAWN).split("train")


def classes(root, seed):
    return ShapeClasses(seed=seed, image_size=48, **DRAWN).split("train")


def memory(root, seed):
    pixels = np.stack([np.full((4, 4), value, np.uint8) for value in (0, seed)])
    loaded = SimpleNamespace(classes=["a", "b"], data=pixels, targets=[0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchvision_sets, "_load", lambda *_: loaded)
        return torchvision_sets.TorchvisionSet(name="MNIST", root=str(root)).split("train")


def stamps(split):
    return [record.read_stamp() for record in split.records()]


@pytest.mark.parametrize("make", [files, folder, tar, shards, shapes, classes, memory])
def test_a_stamp_changes_with_its_image(make, tmp_path):
    before = stamps(make(tmp_path, 0))
    assert before == stamps(make(tmp_path, 0)) and all(before)
    split = make(tmp_path, 3)
    after = stamps(split)
    assert after[1] != before[1]
    assert (after[0] == before[0]) == (make in (files, folder, memory))  # those whose images are apart
    assert stamps(SplitSubset(split, [1])) == after[1:2]


def test_the_overrides_that_turn_an_augmentation_off_are_named():
    drawn = ClassAugment(image_size=8, policy="randaugment", erase=0.2, horizontal_flip=True, min_scale=0.5)
    off = "data.augment.min_scale=1 data.augment.horizontal_flip=false data.augment.policy=null data.augment.erase=0"
    assert find_augment_problem(drawn).endswith(f"turn it off: {off}")
