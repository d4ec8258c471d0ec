"""The classification metrics agree with torchmetrics', whatever the order and the processes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError, MulticlassConfusionMatrix

from vlm.errors import UserError
from vlm.tasks.shared.classes import ClassificationMetric, calibration_error


def make_predictions(count: int, classes: int, seed: int = 0) -> tuple[list[str], Tensor, Tensor]:
    """Ids, probabilities that know something of the labels, and labels, some classes rarer than others."""
    draw = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, generator=draw) ** 2 * classes).long()
    logits = 2 * torch.randn(count, classes, generator=draw) + 3 * torch.nn.functional.one_hot(labels, classes)
    return [f"image {i}" for i in range(count)], logits.softmax(-1), labels


def update(metric: ClassificationMetric, rows: tuple[list[str], Tensor, Tensor], order: list[int], size: int = 7):
    ids, probabilities, labels = rows
    for start in range(0, len(order), size):
        at = order[start : start + size]
        metric.update([ids[i] for i in at], probabilities[at], labels[at])
    return metric


@pytest.mark.parametrize("classes", [2, 5, 6, 30])
def test_agrees_with_torchmetrics(classes: int) -> None:
    rows = make_predictions(500, classes)
    metric = update(ClassificationMetric(num_classes=classes), rows, list(range(500)))
    scores = metric.compute()
    _, probabilities, labels = rows

    def truth(made: type, **options: object) -> Tensor:
        return made(num_classes=classes, **options)(probabilities, labels)

    assert scores["accuracy"] == pytest.approx(truth(MulticlassAccuracy, average="micro").item(), abs=1e-6)
    expected = truth(MulticlassCalibrationError, n_bins=15, norm="l1").item()
    assert scores["calibration_error"] == pytest.approx(expected, abs=1e-5)
    assert np.array_equal(metric.confusion(), truth(MulticlassConfusionMatrix).numpy())
    each = truth(MulticlassAccuracy, average="none").tolist()
    seen = labels.bincount(minlength=classes) > 0
    for mine, theirs, present in zip(metric.per_class(), each, seen.tolist(), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6) if present else mine is None
    balanced = np.mean([value for value, present in zip(each, seen.tolist(), strict=True) if present])
    assert scores["balanced_accuracy"] == pytest.approx(balanced, abs=1e-6)
    assert ("top5" in scores) == (classes > 5)
    if classes > 5:
        top5 = truth(MulticlassAccuracy, average="micro", top_k=5).item()
        assert scores["top5"] == pytest.approx(top5, abs=1e-6)
    half, ends = 1.96 * (scores["accuracy"] * (1 - scores["accuracy"]) / 500) ** 0.5, metric.intervals(seed=0)
    assert ends.keys() == {"accuracy@low", "accuracy@high"}
    assert ends["accuracy@low"] == pytest.approx(scores["accuracy"] - half, abs=0.015)
    assert ends["accuracy@high"] == pytest.approx(scores["accuracy"] + half, abs=0.015)


def test_calibration_error_by_hand() -> None:
    confidences, right = np.array([0.95, 0.97, 0.5, 0.5, 1.0]), np.array([True, False, True, True, True])
    # The last bin holds 0.95, 0.97 and 1.0, two of three right; the eighth, from 7/15 to 8/15, both of 0.5.
    assert calibration_error(confidences, right) == pytest.approx((abs(2.92 - 2) + abs(1.0 - 2)) / 5)
    # An edge belongs to the bin below it; 0 has none below.
    assert calibration_error(np.array([0.5, 0.0]), np.array([True, False]), bins=2) == pytest.approx(0.25)
    assert calibration_error(np.array([0.5, 0.3, 0.8]), np.array([False, True, True]), bins=2) == pytest.approx(0.4 / 3)


def test_order_batches_and_repeated_images_change_no_digit() -> None:
    rows = make_predictions(60, 7)
    scores = update(ClassificationMetric(num_classes=7), rows, list(range(60))).compute()
    again = [*range(59, -1, -1), *range(13)]
    assert update(ClassificationMetric(num_classes=7), rows, again, size=3).compute() == scores


def test_of_equal_probabilities_the_first_class_comes_first() -> None:
    metric = ClassificationMetric(num_classes=8)
    metric.update(["a", "b"], torch.full((2, 8), 1 / 8), torch.tensor([0, 5]))
    scores = metric.compute()
    assert scores["accuracy"] == scores["top5"] == 0.5
    metric = ClassificationMetric(num_classes=3)  # of half precision too
    metric.update(["a"], torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.bfloat16), torch.tensor([1]))
    assert metric.compute()["calibration_error"] == 0.5


def test_predictions_have_names_and_the_control_says_the_class_most_frequent_in_training() -> None:
    metric = ClassificationMetric(num_classes=3)
    metric.update(["b.jpg", "a.jpg"], torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]), torch.tensor([1, 2]))
    metric.compute()
    found = metric.predictions(["cat", "dog", "fox"])
    assert [row["image"] for row in found] == ["a.jpg", "b.jpg"]
    top = {"cat": 0.5, "dog": 0.25, "fox": 0.25}
    assert found[1] == {"image": "b.jpg", "label": "dog", "predicted": "cat", "probability": 0.5, "top": top}
    assert list(found[0]["top"]) == ["fox", "dog", "cat"]
    assert metric.constant([5, 9, 8]) == {"accuracy@constant": 0.5}
    assert metric.constant([9, 5, 8]) == {"accuracy@constant": 0.0}


def test_reset_forgets_and_nothing_cannot_be_scored() -> None:
    rows = make_predictions(20, 4)
    metric = update(ClassificationMetric(num_classes=4), rows, list(range(20)))
    scores = metric.compute()
    metric.reset()
    assert metric.predictions(list("abcd")) == []
    assert metric.confusion().sum() == 0
    with pytest.warns(UserWarning), pytest.raises(UserError, match="no sample to score"):
        metric.compute()
    assert update(metric, rows, list(range(20))).compute() == scores


WORKER = """
import json, sys, torch
from vlm.tasks.shared.classes import ClassificationMetric
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
scores = []
for shares in torch.load(f"{folder}/rows.pt"):
    metric = ClassificationMetric(num_classes=7)
    if shares[rank] is not None:
        metric.update(*shares[rank])
    scores.append([metric.compute(), metric.confusion().tolist()])
json.dump(scores, open(f"{folder}/{rank}.json", "w"))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_two_real_processes_agree_with_one(tmp_path: Path) -> None:
    rows = make_predictions(60, 7)
    whole = update(ClassificationMetric(num_classes=7), rows, list(range(60)))
    expected = [whole.compute(), whole.confusion().tolist()]
    head, tail = tuple(part[:11] for part in rows), tuple(part[5:] for part in rows)  # which share six
    torch.save([(head, tail), (None, rows)], tmp_path / "rows.pt")
    run = [sys.executable, "-c", WORKER]
    workers = [subprocess.Popen([*run, str(rank), str(tmp_path)], cwd=Path(__file__).parents[3]) for rank in range(2)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [expected, expected]
