"""Samples read a batch at a time: those that cannot be read are named, and keys alone decide."""

import pytest
import torch
from classed import lay_out

from vlm.data.batch import BadSample
from vlm.data.fields import ImageField, LabelField
from vlm.data.images.class_augment import ClassAugment
from vlm.data.images.image import Preprocess
from vlm.data.order import Key
from vlm.data.samples import RecordDataset
from vlm.data.sources.class_folders import ClassFolders

KEYS = [Key(0, index) for index in range(6)]


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
    assert batch.bad == [BadSample("train/cat/1.png", batch.bad[0].reason)]
    assert str(tmp_path) in batch.bad[0].reason


def test_a_batch_of_nothing_but_bad_samples(source, tmp_path):
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"")
    batch = samples(source).__getitems__(KEYS)
    assert (batch["images"].shape, batch["images"].dtype) == ((0, 3, 16, 16), torch.uint8)
    assert (batch["labels"].shape, batch["labels"].dtype) == ((0,), torch.int64)
    assert (batch.ids, len(batch.bad)) == ([], 6)


def test_training_draws_by_seed_epoch_index_and_copy_where_there_are_copies(source):
    def pixels(key, **options):
        return samples(source, **{"seed": 0, **options}).__getitems__([key])["images"]

    known = pixels(Key(0, 1))
    assert torch.equal(known, pixels(Key(0, 1)))
    assert not torch.equal(known, pixels(Key(1, 1)))
    assert not torch.equal(known, pixels(Key(0, 1), seed=1))
    first, second = (pixels(Key(0, 1, copy), repeats=2) for copy in (0, 1))
    assert not torch.equal(first, second)
    evaluated = [pixels(Key(epoch, 1), seed=None) for epoch in (0, 1)]
    assert torch.equal(*evaluated)
