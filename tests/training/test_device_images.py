"""Training on images that lie on the device is training on images that workers read."""

from pathlib import Path

import pytest
from compare import rows
from journey import draw_classes, only_run, same_weights
from PIL import Image

from vlm.training.run.fit import main

SMALL = ["task=classification", "data=image_folder", "trainer=cpu", "data.image_size=16", "data.batch_size=6"]
SMALL += ["data.num_workers=0", "model.encoder.patch_size=8", "model.size.dim=24", "model.size.encoder_depth=1"]
SMALL += ["callbacks.progress=null", "trainer.max_epochs=2", "trainer.precision=32-true", "trainer.log_every_n_steps=1"]
ON, PLAIN = "data.images_on_device=true", ["data.augment.min_scale=1", "data.augment.min_ratio=1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 8), ("val", 3)):
        draw_classes(tmp_path / "data" / split, {"red": (200, 20, 20), "blue": (20, 20, 200)}, count=count)
    return tmp_path / "data"


def train_run(folder: Path, runs: Path, *more: str) -> Path:
    assert main([*SMALL, f"data.root={folder}", f"runs={runs}", *more]) == 0
    return only_run(runs)


@pytest.mark.slow
def test_the_same_pixels_train_the_same_weights(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "red" / "broken.png").write_bytes(b"no image")
    more = [*PLAIN, "data.augment.pad_crop=3", "callbacks.bad_samples.limit=1"]
    one = train_run(folder, tmp_path / "read", *more)
    other = train_run(folder, tmp_path / "kept", *more, ON)
    assert same_weights(one / "checkpoints" / "last.ckpt", other / "checkpoints" / "last.ckpt")
    assert rows(one) == rows(other)


@pytest.mark.slow
def test_crops_of_images_of_one_size_train_alike(folder: Path, tmp_path: Path) -> None:
    one, other = (rows(train_run(folder, tmp_path / name, *more)) for name, more in (("read", ()), ("kept", (ON,))))
    losses = [[float(row["train/loss"]) for row in table if "train/loss" in row] for table in (one, other)]
    assert len(losses[0]) > 4 and losses[0] == pytest.approx(losses[1], abs=0.01)


@pytest.mark.sample(plain=1, slow=1)
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("data.augment.policy=randaugment", "data.augment.policy=null"),
        ("data.preprocess.resize=pad", "data.preprocess.resize=squash"),
        ("+data.augment.interpolation=lanczos", "bilinear or bicubic"),
        ("odd size", "images of 48 x 40 and 20 x 20 pixels"),
    ],
)
def test_other_images_are_refused(option: str, said: str, folder: Path, tmp_path: Path, capsys) -> None:
    if option == "odd size":
        Image.new("RGB", (20, 20)).save(folder / "train" / "red" / "odd.png")
    more = [option] if "=" in option else []
    assert main([*SMALL, f"data.root={folder}", f"runs={tmp_path / 'runs'}", *more, ON]) == 2
    error = capsys.readouterr().err
    assert said in error and "data.images_on_device" in error and "Traceback" not in error
