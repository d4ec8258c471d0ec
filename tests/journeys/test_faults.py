"""What a user gets wrong, and what they are told."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from vlm.data.sources.captions import Coco
from vlm.training.run.fit import main


@pytest.fixture
def broken(photos: Path, tmp_path: Path) -> Path:
    """The photos with one that does not decode."""
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    source = Coco(root=str(folder), path="captions.json", val_fraction=0.2, test_fraction=0.2)
    (folder / source.split("train").record(3).id).write_bytes(b"\x89PNG\r\n\x1a\n and nothing more")
    return folder


def data(folder: Path, small: list[str], tmp_path: Path) -> list[str]:
    own = ["data=coco", f"data.root={folder}", "data.path=captions.json", "data.image_size=32", "tokenizer=char"]
    sizes = [
        "data.max_len=80",
        "data.source.val_fraction=0.2",
        "data.source.test_fraction=0.2",
        f"runs={tmp_path}/runs",
    ]
    return [*(value for value in small if "scenes" not in value), *own, *sizes, "trainer.max_epochs=1"]


def test_too_many_bad_images_stop_the_run_and_are_listed(broken, small, tmp_path, capsys) -> None:
    assert main(data(broken, small, tmp_path)) == 1
    said = capsys.readouterr()
    assert "1 of" in said.err and "callbacks.bad_samples.limit" in said.err and ".png" in said.err
    assert "Traceback" not in said.err


def test_a_few_bad_images_are_skipped_and_named(broken, small, tmp_path, capsys) -> None:
    assert main([*data(broken, small, tmp_path), "callbacks.bad_samples.limit=0.2", "data.batch_size=1"]) == 0
    said = capsys.readouterr().out
    assert said.count("skipped: ") == 1 and "test" in said


def alike(overrides, said):
    """A case whose like another one tries too."""
    return pytest.param(overrides, said, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optim.lrr=1"], "optim.lrr: unknown; did you mean lr?"),
        alike(["model.encoder.depth=deep"], "model.encoder.depth"),
        alike(["model.encoder.num_heads=5"], "num_heads"),
        alike(["model.encoder.patch_size=15"], "patch_size"),
        (["data=flickr8k", "data.root=nowhere"], "nowhere"),
        (["data=captions"], "data.root"),
        alike(["data.batch_size=0"], "data.batch_size"),
        alike(["callbacks.checkpoints.mode=most"], "callbacks.checkpoints.mode"),
        alike(["tokenizer.model_type=words"], "tokenizer.model_type"),
        alike(["task=classification", "data=image_folder"], "data.root: has no value; give data.root="),
        (["task=classification", "data=image_folder", "data.root=nowhere"], "data.root=nowhere: no such folder"),
        alike(["task=classification", "data=image_tar"], "data.path: has no value; give data.path="),
        alike(["task=classification", "data=image_tar", "data.path=no.tar"], "data.path=no.tar: no such file"),
        alike(["task=classification", "task.mixup=-1"], "task.mixup"),
        alike(["task=classification", "data.augment.policy=strong"], "policy='strong'"),
        (["task=classification", "data=mnist"], "model.encoder.patch_size: 16 does not divide image_size, 28"),
        (["task=classification", "model.pool=class"], "class_token=true"),
        (["task=language_modeling", "data=text"], "data.path=FILE"),
        alike(["task=language_modeling", "data=text", "data.path=no.txt"], "data.path=no.txt: no such file"),
        alike(["task=language_modeling", "data=text", "data.root=nowhere"], "data.root=nowhere: no such folder"),
        (["task=language_modeling", "data.stride=100"], "data.stride"),
        alike(["task=captoining"], "did you mean captioning?"),
    ],
)
def test_a_wrong_config_is_status_2_and_creates_nothing(overrides, said, small, tmp_path, capsys) -> None:
    own = small if not any(value.startswith(("data=", "task=")) for value in overrides) else []
    assert main([*own, f"runs={tmp_path / 'runs'}", *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and said in captured.err, captured.err
    assert len(captured.err.splitlines()) <= 2 and "Traceback" not in captured.err
    assert not (tmp_path / "runs").exists()


MODELS = {"captioning": "VisionLanguageModel", "classification": "Classifier", "language_modeling": "Decoder"}
SHIPPED = {"tiny": "captioning", "classifier_tiny": "classification", "lm_tiny": "language_modeling"}


def of_each(pairs: list[tuple[str, str]]) -> list[Any]:
    """The first pair of each task; the others are slow, for they say the same."""
    first = {task: (task, other) for task, other in reversed(pairs)}
    return [pair if pair in first.values() else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("task", "model"), of_each([(t, m) for t in MODELS for m, own in SHIPPED.items() if own != t]))
def test_a_model_for_another_task_is_refused_before_data_are_read(task, model, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("vlm.training.run.run.build_data", lambda config: pytest.fail("data were read"))
    assert main([f"task={task}", f"model={model}", f"runs={tmp_path / 'runs'}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: model: {MODELS[SHIPPED[model]]} does not fit task={task}, ")
    assert f"needs a {MODELS[task]};" in said and len(said.splitlines()) <= 2 and "Traceback" not in said
    assert not (tmp_path / "runs").exists()


DATA = {"captioning": "shapes", "classification": "shapes_classes", "language_modeling": "shapes_text"}


@pytest.mark.parametrize(("task", "other"), of_each([(t, o) for t in DATA for o in DATA if o != t]))
def test_data_for_another_task_are_refused_before_they_are_read(task, other, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("vlm.training.run.run.build_data", lambda config: pytest.fail("data were read"))
    assert main([f"task={task}", f"data={DATA[other]}", f"runs={tmp_path / 'runs'}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: data: ") and f"while task={task} reads " in said
    assert len(said.splitlines()) <= 2 and "Traceback" not in said
    assert not (tmp_path / "runs").exists()


def test_a_size_that_nothing_gives_is_named(tmp_path, capsys) -> None:
    """Data and model suit the task here: what is wrong is the reference itself."""
    assert main(["model.size.dim=${data.width}", f"runs={tmp_path / 'runs'}"]) == 2
    said = capsys.readouterr().err
    assert "data.width" in said and "does not fit" not in said and len(said.splitlines()) <= 2
