"""From training to classes, as a user goes."""

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from journey import best, only_run, results
from torch.nn.functional import cross_entropy

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.stored import thaw
from vlm.cli.main import run as vlm
from vlm.training.run.build import build_data
from vlm.training.run.fit import main

pytestmark = pytest.mark.slow

CPU = ["--device", "cpu"]
EXACT = [*CPU, "--precision", "fp32"]


@pytest.fixture(scope="module")
def pictures(trained_classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of the run's test split as files, each named as its sample is."""
    folder = tmp_path_factory.mktemp("pictures")
    split = build_data(thaw(ckpt.read(best(trained_classifier))["vlm"]["config"])).split("test")
    for record in split.records():
        record.image().save(folder / f"{record.id}.png")
    return folder


@pytest.fixture(scope="module")
def told(trained_classifier: Path) -> dict[str, dict]:
    """What the run's own test said of each image."""
    return {each["image"]: each for each in results(trained_classifier / "evaluation" / "test", "predictions")}


def test_the_figures_are_those_of_the_stored_weights(trained_classifier: Path, told: dict[str, dict]) -> None:
    loaded = ckpt.read(best(trained_classifier))
    model, about = ckpt.load_model(loaded), loaded["vlm"]
    records = list(build_data(thaw(about["config"])).split("test").records())
    images = torch.stack([torch.from_numpy(np.array(record.image())) for record in records])
    with torch.inference_mode():
        logits = model(((images / 255 - 0.5) / 0.5).permute(0, 3, 1, 2))
    labels = torch.tensor([record["label"] for record in records])
    metrics, details = (results(trained_classifier / "evaluation" / "test", name) for name in ("metrics", "details"))
    assert metrics["test/loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5)
    confusion = torch.bincount(6 * labels + logits.argmax(-1), minlength=36).view(6, 6)
    assert details["confusion"] == confusion.tolist() and details["classes"] == about["classes"]
    shares = (confusion.diagonal() / confusion.sum(1)).tolist()
    assert details["accuracy"] == pytest.approx(dict(zip(about["classes"], shares, strict=True)))
    assert metrics["test/balanced_accuracy"] == pytest.approx(sum(shares) / 6)  # every class is as frequent
    assert metrics["test/accuracy"] == pytest.approx(sum(shares) / 6)
    assert metrics["test/accuracy@constant"] == pytest.approx(1 / 6)
    top5 = (logits.topk(5).indices == labels[:, None]).any(1).float().mean().item()
    assert metrics["test/top5"] == pytest.approx(top5)
    for record, row in zip(records, logits.softmax(-1), strict=True):
        each = told[record.id]
        assert each["label"] == about["classes"][record["label"]]
        assert each["probability"] == pytest.approx(row.max().item(), rel=1e-4)


def read(form: str, text: str) -> Iterator[tuple[str, str, float]]:
    """Path, class and probability of each line."""
    lines = text.splitlines()
    if form == "text":
        for path, found in (line.split("\t") for line in lines):
            yield path, *found.rpartition(" ")[::2]
    else:
        for row in map(json.loads, lines) if form == "jsonl" else csv.DictReader(lines):
            yield row["image"], row["class"], row["probability"]


@pytest.mark.parametrize(("form", "size"), [("text", 1), ("jsonl", 7), ("csv", 36)])
def test_classes_of_files_are_those_of_the_runs_test(form, size, trained_classifier, pictures, told, tmp_path) -> None:
    out = tmp_path / "found"
    options = ["--format", form, "--out", str(out), "--batch-size", str(size), *EXACT]
    assert vlm(["classify", str(pictures), "-c", best(trained_classifier), *options]) == 0
    found = list(read(form, out.read_text()))
    assert [Path(path).stem for path, _, _ in found] == sorted(told)
    for path, name, probability in found:
        each = told[Path(path).stem]
        assert name == each["predicted"]
        assert float(probability) == pytest.approx(each["probability"], abs=5.1e-5 if form == "text" else 1e-6)


def test_the_likeliest_classes_come_in_order(trained_classifier: Path, pictures: Path, told, capsys) -> None:
    image = str(pictures / "test-0-000004.png")
    arguments = ["classify", image, "-c", best(trained_classifier), *EXACT, "--top"]
    assert vlm([*arguments, "5", "--format", "jsonl"]) == 0
    record = json.loads(capsys.readouterr().out)
    expected = told["test-0-000004"]["top"]
    assert list(record["top"]) == list(expected) and record["class"] == next(iter(expected))
    assert list(record["top"].values()) == pytest.approx(list(expected.values()), abs=1e-6)
    assert vlm([*arguments, "3"]) == 0
    path, found = capsys.readouterr().out.rstrip("\n").split("\t")
    assert path == image
    assert found == "  ".join(f"{name} {value:.4f}" for name, value in list(record["top"].items())[:3])
    assert vlm([*arguments, "2", "--format", "csv"]) == 0
    header, row = csv.reader(capsys.readouterr().out.splitlines())
    assert header == ["image", "class", "probability", "class_2", "probability_2"]
    assert [row[1], row[3]] == list(expected)[:2]
    assert vlm([*arguments, "100", "--format", "jsonl"]) == 0  # more than there are
    top = json.loads(capsys.readouterr().out)["top"]
    assert len(top) == 6 and math.isclose(sum(top.values()), 1, abs_tol=1e-6)


@pytest.mark.slow
def test_a_classifier_of_ones_own_pictures_with_every_recipe(class_folders, small_classes, tmp_path, capsys) -> None:
    common = [value for value in small_classes if "data.source." not in value]
    recipe = ["task.mixup=0.2", "task.cutmix=1.0", "task.label_smoothing=0.1", "data.augment.policy=randaugment"]
    recipe += ["data.augment.magnitude=3", "callbacks=ema", "callbacks.progress=null", "callbacks.ema.decay=0.9"]
    recipe += ["data.augment.erase=0.25", "layer_decay=0.7", "model.size.encoder_depth=2", "schedule=constant"]
    source = ["data=image_folder", f"data.root={class_folders}", "data.source.val_fraction=0.25"]
    assert main([*common, *source, *recipe, "trainer.max_epochs=10", f"runs={tmp_path / 'runs'}"]) == 0
    run = only_run(tmp_path / "runs")
    assert "\nval " in capsys.readouterr().out  # there is no test split, and this is said
    metrics = results(run / "evaluation" / "val")
    assert metrics["val/accuracy"] >= 0.8 > 0.5 > metrics["val/accuracy@constant"]
    loaded = ckpt.read(best(run))
    assert loaded["vlm"]["classes"] == ["dark", "light", "red"]
    last = ckpt.read(run / "checkpoints" / "last.ckpt")
    assert not torch.equal(last["state_dict"]["model.head.weight"], ckpt.inference_weights(last)["head.weight"])
    assert "optimizer_states" not in loaded
    rates = {round(group["lr"], 9) for group in last["optimizer_states"][0]["param_groups"]}
    assert rates == {round(1e-2 * 0.7**below, 9) for below in range(4)}  # head, two blocks, what stands below them
    assert vlm(["classify", str(class_folders / "red"), "-c", best(run), *EXACT]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 12 and sum("\tred " in line for line in said) >= 10
