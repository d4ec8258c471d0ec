"""Runs small enough for a test, through the same entry points that a user has."""

import shlex
from pathlib import Path
from typing import Any

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


def given(overrides: list[str]) -> Any:
    """A fixture: some overrides."""
    return pytest.fixture(lambda: [*overrides], scope="session")


def finished(overrides: list[str], epochs: int) -> Any:
    """A fixture: the folder of a finished run."""

    @pytest.fixture(scope="session")
    def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
        runs = tmp_path_factory.mktemp("runs")
        assert main([*overrides, f"trainer.max_epochs={epochs}", f"runs={runs}"]) == 0
        return only_run(runs)

    return run


small, small_classes, small_text = given(SMALL), given(SMALL_CLASSES), given(SMALL_TEXT)
trained, trained_classifier = finished(SMALL, 2), finished(SMALL_CLASSES, 3)
trained_text = finished(SMALL_TEXT, 2)


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
    looks = {"shapes": ["circle", "square"], "colors": list(COLORS)[:4], "sizes": ["small", "large"]}
    counts = {"train_scenes": 30, "val_scenes": 1, "test_scenes": 1, "captions_per_image": 2}
    write_coco(Shapes(seed=0, image_size=48, **looks, **counts), folder, "train", 30)
    return folder
