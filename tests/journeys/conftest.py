"""Runs small enough for a test, through the same entry points that a user has."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from journey import draw_classes, only_run

from vlm.data.shapes.scene_captions import Shapes, write_coco
from vlm.data.shapes.scenes import COLORS
from vlm.training.run.fit import main

QUIET = shlex.split("""
trainer=cpu trainer.log_every_n_steps=1 callbacks.progress=null data.num_workers=0 data.batch_size=8
data.eval_batch_size=16 model.size.dim=32 model.size.num_heads=2
""")
QUIET += ["trainer.precision=32-true"]  # whatever the processor has: figures are compared to the digit

# Models of a few thousand weights, each on its task's own data.
SMALL = [*QUIET, "model.size.encoder_depth=1", "model.size.decoder_depth=1", "data.source.train_scenes=48"]
SMALL += ["data.source.val_scenes=16", "data.source.test_scenes=20"]
SMALL_CLASSES = shlex.split("""
task=classification data.image_size=32 data.source.colors=[red,green,blue] data.source.shapes=[circle,cross]
data.source.train_scenes=240 data.source.val_scenes=24 data.source.test_scenes=36
model.size.encoder_depth=1 model.encoder.patch_size=8 optim.lr=1e-2
""")
SMALL_CLASSES += QUIET
SMALL_TEXT = shlex.split("""
task=language_modeling data.max_len=32 data.source.train_documents=8 data.source.val_documents=3
data.source.test_documents=4 model.size.depth=1 task.sampled_batches=3 'task.prompts=[A red]' task.prompt_tokens=8
optim.lr=1e-2
""")
SMALL_TEXT += QUIET


@pytest.fixture(scope="session")
def small() -> list[str]:
    return list(SMALL)


@pytest.fixture(scope="session")
def small_classes() -> list[str]:
    return list(SMALL_CLASSES)


@pytest.fixture(scope="session")
def small_text() -> list[str]:
    return list(SMALL_TEXT)


def train(overrides: list[str], runs: Path) -> Path:
    """The folder of a finished run."""
    assert main([*overrides, f"runs={runs}"]) == 0
    return only_run(runs)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two epochs."""
    return train([*SMALL, "trainer.max_epochs=2"], tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def trained_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a classifier's finished run of three epochs."""
    return train([*SMALL_CLASSES, "trainer.max_epochs=3"], tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def trained_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a language model's finished run of two epochs."""
    return train([*SMALL_TEXT, "trainer.max_epochs=2"], tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def class_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three class folders, each with twelve noisy pictures of a colour."""
    root = tmp_path_factory.mktemp("classes")
    draw_classes(root, {"dark": (40, 40, 60), "light": (230, 230, 200), "red": (220, 30, 30)}, count=12)
    return root


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
