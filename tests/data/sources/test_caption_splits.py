"""How captioned images are split."""

import pytest
from captioned import captions, content, picture, refusal

from vlm.data.sources.captions import Captions


def test_names_of_splits_are_normalised(root):
    names = ["train", "Training", "restval", "val", "VALID", "validation", "dev", "test", " testing"]
    for index in range(len(names)):
        picture(root / f"{index}.png")
    rows = "".join(f"{index}.png,text {index},{name}\n" for index, name in enumerate(names))
    source = captions(root, "image,caption,split\n" + rows)
    assert {split: [int(name[0]) for name in held] for split, held in content(source).items()} == {
        "train": [0, 1, 2],
        "val": [3, 4, 5, 6],
        "test": [7, 8],
    }


def test_fractions_do_not_touch_splits_that_the_file_says(root):
    source = captions(root, "image,caption,split\na.png,x,train\nb.png,y,test\n", val_fraction=0.5)
    assert source.splits == ("train", "test")
    assert "train, test" in refusal(source.split, "val")


def test_a_split_column_of_another_name(root):
    source = captions(root, "image,caption,fold\na.png,x,dev\nb.png,y,train\n", split_column="fold")
    assert content(source) == {"train": {"b.png": ["y"]}, "val": {"a.png": ["x"]}}


def test_a_row_of_the_training_file_that_is_held_out_is_not_trained_on(root):
    (root / "all.csv").write_text("image,caption,split\na.png,x,train\nb.png,y,test\n")
    (root / "val.csv").write_text("image,caption\nc.png,z\n")
    message = refusal(captions, root, path="all.csv", val_path="val.csv")
    assert "all.csv, line 3: a row of split test in the training file" in message


def test_one_image_by_an_absolute_and_a_relative_name_is_one(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    (root / "two.csv").write_text(f"image,caption,split\n{root / 'a.png'},x,train\na.png,y,test\n")
    message = refusal(Captions, root=root.name, path="two.csv", val_fraction=0, test_fraction=0)
    assert "is in two splits, train and test" in message


def test_three_files(root):
    for name, image in (("train", "a"), ("val", "b"), ("test", "c")):
        (root / f"{name}.csv").write_text(f"image,caption,split\n{image}.png,text of {image},train\n")
    source = captions(root, path="train.csv", val_path="val.csv", test_path="test.csv")
    assert content(source) == {
        "train": {"a.png": ["text of a"]},
        "val": {"b.png": ["text of b"]},
        "test": {"c.png": ["text of c"]},
    }
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
    assert abs(sizes["val"] - 120) < 30  # three standard deviations
    assert abs(sizes["test"] - 60) < 23
    for images in held.values():
        for name, texts in images.items():
            assert texts == [f"text {k} of {name[:-4]}" for k in range(2)]


def test_fractions_are_the_same_wherever_the_folder_is_and_whatever_is_added(many, monkeypatch):
    whole = content(captions(many, table(600), val_fraction=0.2, test_fraction=0.1))
    part = content(captions(many, table(300), val_fraction=0.2, test_fraction=0.1))
    for split, images in part.items():
        assert set(images) <= set(whole[split])
    monkeypatch.chdir(many)
    assert content(Captions(root=".", path="captions.csv", val_fraction=0.2, test_fraction=0.1)) == part
    assert content(captions(many, table(300), val_fraction=0.2, test_fraction=0.1, seed=1)) != part


def test_more_of_one_split_takes_nothing_from_the_others_start(many):
    small = content(captions(many, table(600), val_fraction=0.1))
    large = content(captions(many, table(600), val_fraction=0.2))
    assert set(small["val"]) < set(large["val"])


@pytest.mark.parametrize(("val", "test"), [(0.5, 0.5), (-0.1, 0.1), (1, 0), (float("nan"), 0)])
def test_impossible_fractions_are_refused(root, val, test):
    message = refusal(captions, root, "image,caption\na.png,x\n", val_fraction=val, test_fraction=test)
    assert "data.source.val_fraction" in message


def test_captions_per_image_draws_anew_in_every_epoch_of_train_alone(root):
    rows = "".join(
        f"{image}.png,text {k},{split}\n" for image, split in (("a", "train"), ("b", "val")) for k in range(5)
    )
    source = captions(root, "image,caption,split\n" + rows, captions_per_image=2)
    train, every = source.split("train"), [f"text {k}" for k in range(5)]
    drawn = [tuple(train.record(0, epoch)["captions"]) for epoch in range(40)]
    assert all(len(set(some)) == 2 and list(some) == sorted(some) for some in drawn)
    assert {text for some in drawn for text in some} == set(every)
    assert drawn == [tuple(source.split("train").record(0, epoch)["captions"]) for epoch in range(40)]
    assert train.record(0)["references"] == source.split("val").record(0)["captions"] == every


def test_forty_thousand_captions_are_read(many):
    rows = [f"{index % 600}.png,a caption of some usual length with the number {index}\n" for index in range(40_000)]
    source = captions(many, "image,caption\n" + "".join(rows))
    assert len(source.split("train")) == 600
