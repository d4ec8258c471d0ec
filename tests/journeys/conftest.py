"""Runs small enough for a test, through the same entry points that a user has."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from journey import only_run

from vlm.data.scenes import COLORS
from vlm.data.shapes import Shapes, write_coco
from vlm.training import main

# A model of a few thousand weights on the main job's own task and data.
SMALL = [
    "trainer=cpu",
    "trainer.log_every_n_steps=1",
    "callbacks.progress=null",
    "data.num_workers=0",
    "data.batch_size=8",
    "data.eval_batch_size=16",
    "data.source.train_scenes=48",
    "data.source.val_scenes=16",
    "data.source.test_scenes=20",
    "model.size.dim=32",
    "model.size.num_heads=2",
    "model.size.encoder_depth=1",
    "model.size.decoder_depth=1",
]


@pytest.fixture(scope="session")
def small() -> list[str]:
    return list(SMALL)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two epochs."""
    runs = tmp_path_factory.mktemp("runs")
    assert main([*SMALL, "trainer.max_epochs=2", f"runs={runs}"]) == 0
    return only_run(runs)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the images and captions of 30 scenes, in COCO's format."""
    folder = tmp_path_factory.mktemp("photos")
    source = Shapes(
        seed=0,
        image_size=48,
        shapes=["circle", "square"],
        colors=list(COLORS)[:4],
        sizes=["small", "large"],
        train_scenes=30,
        val_scenes=1,
        test_scenes=1,
        captions_per_image=2,
    )
    write_coco(source, folder, "train", 30)
    return folder


@pytest.fixture
def read_captions() -> Callable[[Path], list[tuple[str, str]]]:
    """Reads a COCO annotation file as pairs of file name and caption."""

    def read(path: Path) -> list[tuple[str, str]]:
        content = json.loads(path.read_text())
        names = {image["id"]: image["file_name"] for image in content["images"]}
        return [(names[note["image_id"]], note["caption"]) for note in content["annotations"]]

    return read
