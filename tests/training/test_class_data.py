"""Images in classes for training: batches, hold-outs, repeats, and what a checkpoint must agree with."""

from collections import Counter

import numpy as np
import pytest
import torch
from captioned import refusal
from classed import lay_out
from vlm.data.repeats import RepeatedBatches
from vlm.data.sources.image_folder import ImageFolder
from vlm.training.class_data import ClassData, ClassDataset

from vlm.data.batch import BadSample
from vlm.data.images.class_augment import ClassAugment
from vlm.data.images.image import Preprocess
from vlm.data.shapes.scene_classes import ShapeClasses

SHAPES = {"shapes": ["circle", "cross"], "colors": ["red", "blue"], "sizes": ["small", "large"], "image_size": 32}


def shapes(**options):
    lengths = {"train_scenes": 40, "val_scenes": 8, "test_scenes": 12}
    return ShapeClasses(**{"seed": 0, **SHAPES, **lengths, **options})


def data(source, augment=None, **options):
    given = {"batch_size": 8, "eval_batch_size": 8, "num_workers": 0, "seed": 0, **options}
    augment = ClassAugment(image_size=16, **(augment or {}))
    return ClassData(source=source, preprocess=Preprocess(image_size=16), augment=augment, **given)


def folder(root, splits=("",), **sizes):
    names = [f"{split}{name}/{n:03}.png" for split in splits for name, size in sizes.items() for n in range(size)]
    lay_out(root, *names)
    return ImageFolder(root=str(root), val_fraction=0)


def everything(loader):
    return [
        (id, label, image) for b in loader for id, label, image in zip(b.ids, b.labels.tolist(), b.images, strict=True)
    ]


def test_batches(tmp_path):
    module = data(folder(tmp_path, ("train/", "val/", "test/"), cat=9, dog=6))
    batches = list(module.train_dataloader())
    assert [batch.images.shape for batch in batches] == [(8, 3, 16, 16), (7, 3, 16, 16)]
    assert batches[0].images.dtype == torch.uint8
    assert batches[0].labels.dtype == torch.int64
    found = {id: label for id, label, _ in everything(batches)}
    assert found == {f"train/{c}/00{n}.png": k for k, (c, s) in enumerate((("cat", 9), ("dog", 6))) for n in range(s)}
    assert module.sizes == {"num_classes": 2}
    assert module.parts["classes"] == ["cat", "dog"]
    assert module.counts("test") == [9, 6]
    ids = [id for id, _, _ in everything(module.test_dataloader())]
    assert ids == [module.split("test").sample_id(0, index) for index in range(15)]


def test_evaluation_sees_what_preprocessing_gives(tmp_path):
    source = folder(tmp_path, ("train/", "val/"), cat=3, dog=3)
    module = data(source, augment={"policy": "randaugment", "erase": 1.0})
    for index, (_, _, pixels) in enumerate(everything(module.val_dataloader())):
        assert torch.equal(pixels, module.preprocess(source.split("val").image(0, index)))


def test_without_validation_each_class_gives_its_share(tmp_path):
    source = folder(tmp_path, ("train/", "test/"), a=100, b=50, c=3)
    module = data(source)
    train, val = module.split("train"), module.split("val")
    assert module.counts("val") == [2, 1, 0]
    assert module.counts("train") == [98, 49, 3]
    names = [split.sample_id(0, i) for split in (train, val) for i in range(len(split))]
    assert len(set(names)) == 153
    assert val.image(0, 0) == source.split("train").image(0, val.indices[0])
    assert data(source, seed=1).split("val").indices != val.indices


def test_too_few_to_hold_one_out(tmp_path):
    assert "one image alone" in refusal(data, folder(tmp_path, cat=1, dog=1))


def test_so_many_training_samples_have_all_classes(tmp_path):
    module = data(folder(tmp_path, ("train/", "val/"), a=40, b=20, c=20), train_samples=8)
    assert module.counts("train") == [4, 2, 2]
    fresh = data(shapes(), train_samples=8)
    assert fresh.counts("train") == [2, 2, 2, 2]
    once, again = fresh.dataset("train", augmented=False)[0, 3], fresh.dataset("train", augmented=False)[5, 3]
    assert torch.equal(once.image, again.image)
    assert len(data(shapes(), train_samples=1000).split("train")) == 40


def test_bad_images_are_told_from_good_ones(tmp_path):
    source = folder(tmp_path, ("train/", "val/"), cat=3, dog=3)
    (tmp_path / "val" / "cat" / "001.png").write_bytes(b"no image")
    (batch,) = data(source).val_dataloader()
    assert len(batch.ids) == len(batch.labels) == len(batch.images) == 5
    assert batch.bad == [BadSample("val/cat/001.png", batch.bad[0].reason)]
    assert str(tmp_path) in batch.bad[0].reason
    for path in (tmp_path / "val").rglob("*.png"):
        path.write_bytes(b"")
    (batch,) = data(source).val_dataloader()
    assert batch.images.shape == (0, 3, 16, 16)
    assert batch.labels.shape == (0,)
    assert len(batch.bad) == 6


@pytest.mark.parametrize("repeats", [1, 2])
def test_epochs_and_workers_change_nothing_but_the_keys(tmp_path, repeats):
    source = folder(tmp_path, ("train/", "val/"), cat=12, dog=12)
    options = {"augment": {"policy": "autoaugment", "min_scale": 0.5}, "repeats": repeats}
    runs = [everything(data(source, num_workers=workers, **options).train_dataloader()) for workers in (0, 2)]
    assert [row[:2] for row in runs[0]] == [row[:2] for row in runs[1]]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(*runs, strict=True))


def test_a_cache_changes_no_pixel(tmp_path):
    source = folder(tmp_path, ("train/", "val/"), cat=4, dog=4)
    modules = [data(source, augment={"policy": "randaugment"}, cache_images=cached) for cached in (False, True)]
    for _ in range(2):
        rows = [everything(module.train_dataloader()) for module in modules]
        assert all(torch.equal(a[2], b[2]) for a, b in zip(*rows, strict=True))
    for path in (tmp_path / "train").rglob("*.png"):
        path.unlink()
    assert len(everything(modules[1].train_dataloader())) == 8
    assert not everything(modules[0].train_dataloader())


def test_a_fresh_split_is_never_cached():
    dataset = ClassDataset(split=shapes().split("train"), preprocess=Preprocess(image_size=16), cache_images=True)
    assert not torch.equal(dataset[0, 0].image, dataset[1, 0].image)


def test_repeats_show_an_image_in_one_batch_each_time_anew(tmp_path):
    source = folder(tmp_path, ("train/", "val/"), cat=32, dog=32)
    module = data(source, augment={"policy": "randaugment", "min_scale": 0.3}, repeats=4)
    batches = list(module.train_dataloader())
    assert len(batches) == module.train_batches() == 8
    shown = Counter(id for batch in batches for id in batch.ids)
    assert set(shown.values()) == {4}
    for batch in batches:
        assert set(Counter(batch.ids).values()) == {4}
        assert len({image.numpy().tobytes() for image in batch.images}) > 4
    first = batches[0].images[[id == batches[0].ids[0] for id in batches[0].ids]]
    assert len({image.numpy().tobytes() for image in first}) == 4


def test_other_images_are_repeated_in_other_epochs_and_all_ranks_share_them():
    options = {"repeats": 3, "size": 100, "batch_size": 12, "seed": 1, "position": lambda: (0, 0)}
    batches = RepeatedBatches(**options)
    epochs = [np.concatenate(batches.global_batches(epoch)) for epoch in range(12)]
    assert all(len(copies) == len(set(copies.tolist())) == 100 for copies in epochs)
    assert len({int(copy) // 3 for copies in epochs for copy in copies}) > 95
    ranks = [list(RepeatedBatches(**options, rank=rank, world=2)) for rank in range(2)]
    for whole, *shares in zip(batches, *ranks, strict=True):
        assert shares == [whole[0::2], whole[1::2]]
    later = RepeatedBatches(**{**options, "position": lambda: (0, 5)})
    assert list(later) == list(batches)[5:]


def test_repeats_must_divide_the_batch():
    assert "data.repeats=3" in refusal(data, shapes(), repeats=3)
    assert "data.repeats=0" in refusal(data, shapes(), repeats=0)


def test_a_checkpoint_gives_its_preprocessing_and_asks_for_its_classes(tmp_path):
    module = data(folder(tmp_path, ("train/", "val/"), cat=2, dog=2))
    state = Preprocess(image_size=8, mean=[0.1, 0.2, 0.3]).state()
    module.restore({"classes": ["cat", "dog"], "preprocess": state})
    assert module.preprocess.state() == state
    assert next(iter(module.val_dataloader())).images.shape == (4, 3, 8, 8)
    message = refusal(module.restore, {"classes": ["cat", "wolf", "dog"], "preprocess": state})
    assert "only there: wolf" in message
    assert "only here" not in message
    assert "order" in refusal(module.restore, {"classes": ["dog", "cat"], "preprocess": state})


def test_the_fingerprint_tells_names_and_labels(tmp_path):
    first = data(folder(tmp_path / "a", ("train/", "val/"), cat=3, dog=3)).fingerprint()
    assert data(folder(tmp_path / "b", ("train/", "val/"), cat=3, dog=3)).fingerprint() == first
    assert data(folder(tmp_path / "c", ("train/", "val/"), cat=4, dog=3)).fingerprint() != first
    assert data(folder(tmp_path / "d", ("train/", "val/"), cat=3, dogs=3)).fingerprint() != first
    assert data(shapes()).fingerprint() == data(shapes()).fingerprint() != data(shapes(train_scenes=41)).fingerprint()


def test_shape_classes_are_what_they_are_called():
    source = shapes(image_size=64)
    assert source.classes == ["red circle", "red cross", "blue circle", "blue cross"]
    split = source.split("train")
    assert [split.label(0, index) for index in range(6)] == [0, 1, 2, 3, 0, 1]
    for index in range(40):
        pixels = np.asarray(split.image(2, index)).astype(int)
        red, _, blue = pixels[np.abs(pixels - pixels[0, 0]).sum(-1) > 120].mean(0)
        assert ("red" if red > blue else "blue") in source.classes[split.label(2, index)]
    assert split.image(0, 0) == split.image(0, 0) != split.image(1, 0)
    held = source.split("val")
    assert held.image(0, 0) == held.image(1, 0) != split.image(0, 0)
    assert split.sample_id(1, 2) == "train-1-000002"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shapes": ["circel"]}, "data.source.shapes: unknown 'circel'"),
        ({"colors": []}, "data.source.colors: is empty"),
        ({"sizes": ["small", "small"]}, "data.source.sizes: a name stands there twice"),
        ({"image_size": 8}, "data.source.image_size: 8 is too small"),
        ({"val_scenes": 0}, "data.source.val_scenes: 0 is too small"),
        ({"colors": ["red"], "shapes": ["circle"]}, "is one class"),
    ],
)
def test_shapes_that_cannot_be_drawn(wrong, message):
    assert message in refusal(shapes, **wrong)
