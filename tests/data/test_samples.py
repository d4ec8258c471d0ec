"""Samples read a batch at a time: those that cannot be read are named, and keys alone decide."""

import pytest
import torch
from classed import lay_out

from vlm.data.fields import ImageField, LabelField
from vlm.data.images.class_augment import ClassAugment
from vlm.data.images.image import Preprocess
from vlm.data.samples import RecordDataset, SampleKey
from vlm.data.sources.class_folders import ClassFolders

KEYS = [SampleKey(0, index) for index in range(6)]


@pytest.fixture
def source(tmp_path):
    lay_out(tmp_path, *(f"train/{name}/{n}.png" for name in ("cat", "dog") for n in range(3)))
    return ClassFolders(root=str(tmp_path))


def samples(source, **options):
    augment = ClassAugment(image_size=16, policy="randaugment", min_scale=0.3)
    labels = LabelField()
    labels.open(source, {}, seed=0, cache=None)
    fields = {"images": ImageField(preprocess=Preprocess(image_size=16), augment=augment), "labels": labels}
    return RecordDataset(source.split("train"), fields, **options)


def test_the_good_are_kept_and_the_bad_are_named(source, tmp_path):
    (tmp_path / "train" / "cat" / "1.png").write_bytes(b"no image")
    batch = samples(source).__getitems__(KEYS)
    assert batch.ids == [f"train/{name}.png" for name in ("cat/0", "cat/2", "dog/0", "dog/1", "dog/2")]
    assert batch["labels"].tolist() == [0, 0, 1, 1, 1] and len(batch["images"]) == 5
    assert [bad.id for bad in batch.bad] == ["train/cat/1.png"] and str(tmp_path) in batch.bad[0].reason
    nothing = samples(source).__getitems__([KEYS[1]])
    assert (nothing["images"].shape, nothing["images"].dtype) == ((0, 3, 16, 16), torch.uint8)
    assert (nothing["labels"].shape, nothing["labels"].dtype) == ((0,), torch.int64)
    assert (nothing.ids, nothing.bad) == ([], batch.bad)


def test_training_draws_by_seed_epoch_index_and_copy_where_there_are_copies(source):
    def pixels(*key, **options):
        return samples(source, **{"seed": 0, **options}).__getitems__([SampleKey(*key)])["images"]

    known = pixels(0, 1)
    assert torch.equal(known, pixels(0, 1))
    assert not torch.equal(known, pixels(1, 1)) and not torch.equal(known, pixels(0, 1, seed=1))
    assert not torch.equal(pixels(0, 1, 0, repeats=2), pixels(0, 1, 1, repeats=2))
    assert torch.equal(pixels(0, 1, seed=None), pixels(1, 1, seed=None))
