"""How captioned images are split."""

import pytest
from captioned import captions, content, picture, refusal

from vlm.data.sources.captions import Captions


def test_names_of_splits_are_normalised(root):
    names = ["train", "Training", "restval", "val", "VALID", "validation", "dev", "test", " testing"]
    for index in range(len(names)):
        picture(root / f"{index}.png")
    rows = "".join(f"{index}.png,text {index},{name}\n" for index, name in enumerate(names))
    found = content(captions(root, "image,caption,fold\n" + rows, split_column="fold"))
    held = {split: [int(name[0]) for name in images] for split, images in found.items()}
    assert held == {"train": [0, 1, 2], "val": [3, 4, 5, 6], "test": [7, 8]}


def test_one_image_by_an_absolute_and_a_relative_name_is_one(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    (root / "two.csv").write_text(f"image,caption,split\n{root / 'a.png'},x,train\na.png,y,test\n")
    message = refusal(Captions, root=root.name, path="two.csv", val_fraction=0, test_fraction=0)
    assert "is in two splits, train and test" in message


def test_an_image_of_two_files_is_refused(root):
    (root / "train.csv").write_text("image,caption\na.png,x\n")
    (root / "test.csv").write_text("image,caption\nc.png,x\n./a.png,leak\n")
    message = refusal(captions, root, path="train.csv", test_path="test.csv")
    assert "test.csv, line 3: ./a.png is in two splits, train and test" in message


@pytest.fixture
def many(tmp_path):
    for index in range(600):
        (tmp_path / f"{index}.png").touch()  # no test that uses it reads an image
    return tmp_path


def table(count):
    return "image,caption\n" + "".join(f"{i}.png,text {k} of {i}\n" for k in range(2) for i in range(count))


def test_fractions_are_by_image_and_as_large_as_asked_for(many):
    held = content(captions(many, table(600), val_fraction=0.2, test_fraction=0.1))
    sizes = {split: len(images) for split, images in held.items()}
    assert sum(sizes.values()) == 600  # no image in two
    assert abs(sizes["val"] - 120) < 30 and abs(sizes["test"] - 60) < 23  # three standard deviations
    for name, texts in [pair for images in held.values() for pair in images.items()]:
        assert texts == [f"text {k} of {name[:-4]}" for k in range(2)]


def test_fractions_are_the_same_wherever_the_folder_is_and_whatever_is_added(many, monkeypatch):
    shares = {"val_fraction": 0.2, "test_fraction": 0.1}
    whole, part = (content(captions(many, table(count), **shares)) for count in (600, 300))
    assert all(set(images) <= set(whole[split]) for split, images in part.items())
    more = content(captions(many, table(600), val_fraction=0.4))
    assert set(whole["val"]) < set(more["val"])  # more of one split takes nothing from the others' start
    assert content(captions(many, table(300), **shares, seed=1)) != part
    monkeypatch.chdir(many)
    assert content(Captions(root=".", path="captions.csv", **shares)) == part


def test_captions_per_image_draws_anew_in_every_epoch_of_train_alone(root):
    rows = "".join(
        f"{image},text {k},{split}\n" for image, split in (("a.png", "train"), ("b.png", "val")) for k in range(5)
    )
    source = captions(root, "image,caption,split\n" + rows, captions_per_image=2)
    train, every = source.split("train"), [f"text {k}" for k in range(5)]
    drawn = [tuple(train.record(0, epoch)["captions"]) for epoch in range(40)]
    assert all(len(set(some)) == 2 and list(some) == sorted(some) for some in drawn)
    assert {text for some in drawn for text in some} == set(every)
    assert drawn == [tuple(source.split("train").record(0, epoch)["captions"]) for epoch in range(40)]
    assert train.record(0)["references"] == source.split("val").record(0)["captions"] == every
