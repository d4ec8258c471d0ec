"""Files of features: what was written comes back, and what was not is known to be missing."""

import os
import pickle
import resource
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from caption_data import captions, picture
from class_data import lay_out, pack
from sharded import caption_members, write_tar

from vlm.data import features as feature_file
from vlm.data.features import DTYPES, PAGE, FeatureFile, Layout, find_augment_problem, open_features
from vlm.data.images.class_augment import ClassAugment
from vlm.data.images.image import ImageError
from vlm.data.records import SplitSubset
from vlm.data.shapes.scene_captions import Shapes
from vlm.data.shapes.scene_labels import ShapeClasses
from vlm.data.sources import torchvision_sets
from vlm.data.sources.class_folders import ClassFolders
from vlm.data.sources.shards import Shards
from vlm.errors import UserError


def layout(images=5, dtype="float32", source="a"):
    return Layout(source=source, images=images, states=3, width=4, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_features_come_back_to_the_bit(dtype, tmp_path):
    file = open_features(tmp_path, layout(PAGE + 3, dtype))
    features = torch.randn(3, 3, 4).to(DTYPES[dtype])
    file.write([PAGE + 2, 0, 7], features)
    again = pickle.loads(pickle.dumps(file))
    for at, index in enumerate((PAGE + 2, 0, 7)):
        assert again.read(index).dtype == DTYPES[dtype] and torch.equal(again.read(index), features[at])
    assert sorted({*range(PAGE + 3)} - {*again.missing()}) == [0, 7, PAGE + 2]


def test_what_is_missing_is_not_read_as_zeros(tmp_path):
    file = open_features(tmp_path, layout())
    file.faults[1] = "1.png: is damaged"
    file.write([0, 4], torch.ones(2, 3, 4))
    assert file.missing() == [1, 2, 3]
    for index, said in ((1, "1.png: is damaged"), (2, "no features of image 2")):
        with pytest.raises(ImageError, match=said):
            pickle.loads(pickle.dumps(file)).read(index)


@pytest.mark.parametrize("at", [0, 17, 47])
@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_is_named_and_others_are_read(tmp_path, at, bit):
    file = open_features(tmp_path, layout())
    file.write([0, 1], torch.randn(2, 3, 4))
    content = bytearray(file.path.read_bytes())
    content[layout().start + layout().row + at] ^= bit
    file.path.write_bytes(content)
    again = open_features(tmp_path, layout())
    again.read(0)
    with pytest.raises(UserError, match=r"features: the features of image 1 are corrupted.*delete the file") as fault:
        again.read(1)
    assert not isinstance(fault.value, ImageError) and fault.value.status == 1


def test_features_whose_sum_is_nothing_are_there_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_file.zlib, "crc32", lambda data: 0)
    file = open_features(tmp_path, layout())
    file.write([2], torch.ones(1, 3, 4))
    assert 2 not in file.missing() and torch.equal(file.read(2), torch.ones(3, 4))


def test_each_layout_has_a_file_of_its_own(tmp_path):
    layouts = [layout(), layout(6), layout(dtype="bfloat16"), layout(source="b")]
    assert len({given.path(tmp_path) for given in layouts}) == 4
    open_features(tmp_path, layout()).write([0], torch.ones(1, 3, 4))
    assert 0 not in open_features(tmp_path, layout()).missing()
    with pytest.raises(UserError, match="incomplete or contains other features"):
        FeatureFile(layout().path(tmp_path), layout(source="b"))


def test_a_file_that_was_cut_short_is_made_anew(tmp_path):
    file = open_features(tmp_path, layout())
    file.write([0], torch.ones(1, 3, 4))
    with file.path.open("r+b") as content:
        content.truncate(layout().size - 1)
    assert open_features(tmp_path, layout()).missing() == [*range(5)]
    assert not list(tmp_path.glob(".*"))


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path, monkeypatch):
    file = open_features(tmp_path, layout())
    monkeypatch.setattr(feature_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=96))
    file.check_free_space(2)
    with pytest.raises(UserError, match=r"of 3 images need 0.00 MB.*free disk space.*runs.*data.cache_features"):
        file.check_free_space(3)


def test_a_disk_that_fills_up_ends_in_a_line_and_leaves_what_was_done(tmp_path):
    file = open_features(tmp_path, layout())
    file.write([0], torch.ones(1, 3, 4))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (layout().start + 3 * 48 + 10, limits[1]))
        with pytest.raises(UserError, match=r"cannot be written.*free disk space"):
            file.write([1, 3], torch.ones(2, 3, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert open_features(tmp_path, layout()).missing() == [1, 2, 3, 4]


DRAWN = {"shapes": ["circle", "cross"], "colors": ["red", "blue"], "sizes": ["small", "large"]}
DRAWN |= {"train_scenes": 4, "val_scenes": 2, "test_scenes": 2}


def set_written_time(path, second):
    """Sets the time at which a file was written."""
    os.utime(path, ns=(0, second * 10**9))


def files(root, seed):
    for name, second in (("b.png", 0), ("a.png", seed)):
        picture(root / name)
        set_written_time(root / name, second)
    return captions(root, "image,caption,split\nb.png,b,train\na.png,a,train\n").split("train")


def folder(root, seed):
    lay_out(root, "train/x/b.png", "train/y/a.png", "val/x/c.png", "val/y/d.png")
    for name, second in (("x/b.png", 0), ("y/a.png", seed)):
        set_written_time(root / "train" / name, second)
    return ClassFolders(root=str(root)).split("train")


def tar(root, seed):
    folder(root / "files", 0)
    set_written_time(pack(root / "all.tar", root / "files"), seed)
    return ClassFolders(path=str(root / "all.tar")).split("train")


def shards(root, seed):
    set_written_time(write_tar(root / "train/0.tar", caption_members(2)), seed)
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
