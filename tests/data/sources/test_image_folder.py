"""Folders of classes: the listing of torchvision's ImageFolder, splits that keep each class's share, clear refusals."""

from collections import Counter
from pathlib import Path

import pytest
from captioned import refusal
from classed import content, lay_out, tiny
from torchvision.datasets import ImageFolder as TorchvisionFolder
from vlm.data.sources.class_source import stratified
from vlm.data.sources.image_folder import ImageFolder

from vlm.data.images.image import ImageError, load_image


def folder(root, **options):
    return ImageFolder(root=str(root), **options)


def many(root, prefix="", **sizes):
    lay_out(root, *(f"{prefix}{name}/{number:03}.png" for name, size in sizes.items() for number in range(size)))


def test_the_listing_is_torchvisions(tmp_path):
    many(tmp_path, cat=3, Dog=2, bird=4)
    lay_out(tmp_path, "cat/more/1.png", "bird/B.PNG")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    source, truth = folder(tmp_path, val_fraction=0), TorchvisionFolder(str(tmp_path))
    assert source.classes == truth.classes
    split = source.split("train")
    ours = [(str(tmp_path / split.sample_id(0, i)), split.label(0, i)) for i in range(len(split))]
    assert sorted(ours) == sorted(truth.samples)
    for index, (path, _) in enumerate(ours):
        assert split.image(3, index) == load_image(path)


@pytest.mark.parametrize("validation", ["val", "valid", "Validation", "dev"])
def test_folders_say_the_splits(tmp_path, validation):
    many(tmp_path, "train/", cat=2, dog=3)
    many(tmp_path, f"{validation}/", dog=1)
    many(tmp_path, "test/", cat=1, dog=1)
    source = folder(tmp_path)
    assert source.splits == ("train", "val", "test")
    assert content(source) == {
        "train": {f"train/{name}/00{n}.png": name for name, size in (("cat", 2), ("dog", 3)) for n in range(size)},
        "val": {f"{validation}/dog/000.png": "dog"},
        "test": {"test/cat/000.png": "cat", "test/dog/000.png": "dog"},
    }


def test_train_and_test_alone(tmp_path):
    many(tmp_path, "train/", cat=2, dog=3)
    many(tmp_path, "test/", cat=1)
    assert folder(tmp_path).splits == ("train", "test")


def test_a_class_may_be_called_train(tmp_path):
    many(tmp_path, train=3, car=3)
    source = folder(tmp_path, val_fraction=0)
    assert source.classes == ["car", "train"]
    assert len(source.split("train")) == 6


def test_a_folder_around_it_all_does_not_matter(tmp_path):
    many(tmp_path, "set/train/", cat=2, dog=2)
    many(tmp_path, "set/val/", cat=1)
    assert content(folder(tmp_path))["val"] == {"set/val/cat/000.png": "cat"}


def test_without_split_folders_each_class_keeps_its_share(tmp_path):
    sizes = {"a": 40, "b": 23, "c": 7, "d": 2}
    many(tmp_path, **sizes)
    found = content(folder(tmp_path, val_fraction=0.2, test_fraction=0.1))
    assert [len(found[name]) for name in ("val", "test")] == [14, 7]
    for name, fraction in (("val", 0.2), ("test", 0.1)):
        counts = Counter(found[name].values())
        assert all(abs(counts[label] - fraction * size) < 1.2 for label, size in sizes.items())
    everything = [path for split in found.values() for path in split]
    assert len(everything) == len(set(everything)) == sum(sizes.values())
    assert set(found["train"].values()) == set(sizes)


def test_the_seed_chooses_and_the_order_of_the_files_does_not(tmp_path):
    many(tmp_path, a=30, b=30)
    assert content(folder(tmp_path)) == content(folder(tmp_path))
    assert content(folder(tmp_path)) != content(folder(tmp_path, seed=1))


def test_most_images_stay_where_they_are_when_others_are_added(tmp_path):
    many(tmp_path, a=100, b=100)
    before = set(content(folder(tmp_path))["val"])
    many(tmp_path, a=110, b=100)
    assert len(before & set(content(folder(tmp_path))["val"])) >= 0.8 * len(before)


@pytest.mark.parametrize("leave", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 5, 13, 40, 77])
def test_shares_are_fair_to_within_one(count, leave):
    sizes = [1, 2, 5, 29, 40]
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    names = [f"image {i}" for i in range(len(labels))]
    taken = stratified(labels, names, count, seed=3, leave=leave)
    assert taken == sorted(set(taken))
    found = Counter(labels[index] for index in taken)
    for label, size in enumerate(sizes):
        assert found[label] <= size - leave
        assert abs(found[label] - count * size / 77) < 1 or found[label] == size - leave
    assert len(taken) == count if leave == 0 else len(taken) >= min(count, 77 - 5) - len(sizes)
    # Names, not places, decide.
    turned = stratified(labels[::-1], names[::-1], count, seed=3, leave=leave)
    assert {names[i] for i in taken} == {names[::-1][i] for i in turned}


def test_equal_classes_share_what_cannot_be_divided_by_the_seed():
    labels = [index % 50 for index in range(500)]
    names = [str(index) for index in range(500)]
    chosen = [{labels[i] for i in stratified(labels, names, 10, seed=seed)} for seed in range(5)]
    assert all(len(classes) == 10 for classes in chosen)
    assert len({frozenset(classes) for classes in chosen}) == 5


def test_hidden_files_are_passed_over(tmp_path):
    many(tmp_path, cat=2, dog=2)
    lay_out(tmp_path, ".cache/1.png", "cat/._000.png", "__MACOSX/cat/1.png")
    source = folder(tmp_path, val_fraction=0)
    assert len(source.split("train")) == 4
    assert not source.skipped


def test_what_is_left_out_is_said(tmp_path):
    many(tmp_path, "train/", cat=2, dog=2)
    lay_out(tmp_path, "train/loose.png", "extra/cat/1.png", "extra/cat/2.png")
    assert folder(tmp_path).skipped == [
        f"{tmp_path}/extra/cat: 2 images not in a class folder of a split",
        f"{tmp_path}/train: 1 image not in a class folder of a split",
    ]


def test_links_are_followed_but_not_in_circles(tmp_path):
    many(tmp_path / "data", cat=2, dog=1)
    many(tmp_path / "else", bird=2)
    (tmp_path / "data" / "bird").symlink_to(tmp_path / "else" / "bird")
    (tmp_path / "data" / "cat" / "up").symlink_to(tmp_path / "data")
    source = folder(tmp_path / "data", val_fraction=0)
    assert source.classes == ["bird", "cat", "dog"]
    assert len(source.split("train")) == 5


def test_an_unreadable_image_is_named(tmp_path):
    many(tmp_path, cat=1, dog=1)
    (tmp_path / "cat" / "bad.png").write_bytes(b"no image")
    split = folder(tmp_path, val_fraction=0).split("train")
    bad = next(i for i in range(len(split)) if "bad" in split.sample_id(0, i))
    with pytest.raises(ImageError, match=r"bad\.png: damaged"):
        split.image(0, bad)


def test_refusals_name_the_folder_and_the_remedy(tmp_path):
    assert "set data.root" in refusal(folder, tmp_path / "absent")
    (tmp_path / "file").write_text("")
    assert "set data.root" in refusal(folder, tmp_path / "file")
    (tmp_path / "file").unlink()
    assert "holds no image" in refusal(folder, tmp_path)
    tiny(tmp_path / "1.png")
    assert "none in a folder that names its class" in refusal(folder, tmp_path)
    many(tmp_path, cat=1)
    assert "one class alone, cat" in refusal(folder, tmp_path)
    many(tmp_path, dog=1)
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty: holds no image" in refusal(folder, tmp_path)
    assert "val_fraction=0.6" in refusal(folder, tmp_path, val_fraction=0.6, test_fraction=0.4)
    (tmp_path / "empty").rmdir()
    assert "no split 'test'; it has train" in refusal(folder(tmp_path).split, "test")


def test_classes_must_agree_between_splits(tmp_path):
    many(tmp_path, "train/", cat=1, dog=1)
    many(tmp_path, "val/", cat=1, wolf=1)
    message = refusal(folder, tmp_path)
    assert f"{tmp_path}/val/wolf" in message
    assert "no class 'wolf'" in message


def test_splits_need_train_and_its_classes_images(tmp_path):
    many(tmp_path, "val/", cat=1, dog=1)
    many(tmp_path, "test/", cat=1)
    assert "test and val, but no train folder" in refusal(folder, tmp_path)
    many(tmp_path, "train/", cat=1, dog=1)
    Path(tmp_path / "train" / "wolf").mkdir()
    assert f"{tmp_path}/train/wolf: holds no image" in refusal(folder, tmp_path)
