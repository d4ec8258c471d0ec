"""Cached predictions of a teacher: the same loss as without a cache, what they depend on, and what is not cached."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distillation_tasks import build, first_batch

from vlm.data.records import ListSplit, Record
from vlm.errors import UserError
from vlm.tasks.shared import teacher_cache
from vlm.tasks.shared.teacher_cache import PredictionCache, check_cacheable, read_arrays, to_arrays

CACHED = ["task.teacher.cache=true"]
PLAIN = ["task.mixup=0", "task.cutmix=0", "data.augment.min_scale=1", "data.augment.horizontal_flip=false"]
SAME = {
    "captioning": [*CACHED, "task.teacher.top_k=5", "data.source.captions_per_image=null", "data.train_samples=40"],
    "classification": [*CACHED, *PLAIN, "data.train_samples=40"],
    "language_modeling": [*CACHED, "task.teacher.top_k=5"],
    "text_classification": [*CACHED, "data.train_samples=40"],
}


def prepare_task(name: str, *options: str) -> Any:
    task = build(name, *options, "model.size.dropout=0")
    task.distillation.prepare()
    return task.train()


@pytest.mark.sample(plain=1, slow=4)
@pytest.mark.parametrize("name", SAME)
def test_the_loss_is_that_without_a_cache(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, plain = (
        prepare_task(name, *SAME[name], *more, f"runs={tmp_path}") for more in ([], ["task.teacher.cache=false"])
    )
    assert task.distillation._model is None and len([*(tmp_path / "cache").glob("*.teacher.npz")]) == 1
    batch = first_batch(task)
    own, truth = (side.loss(batch) for side in (task, plain))
    torch.testing.assert_close(own["teacher"].total, truth["teacher"].total, rtol=1e-4, atol=1e-4)
    assert own["teacher"].count == truth["teacher"].count > 0
    monkeypatch.setattr(teacher_cache, "compute_outputs", lambda *args: pytest.fail("they are stored"))
    again = prepare_task(name, *SAME[name], f"runs={tmp_path}")
    torch.testing.assert_close(again.loss(batch)["teacher"].total, own["teacher"].total, rtol=0, atol=0)
    with pytest.raises(pytest.fail.Exception, match="they are stored"):
        prepare_task(name, *SAME[name], f"runs={tmp_path}", "task.teacher.temperature=3")
    with pytest.raises(pytest.fail.Exception, match="they are stored"):
        prepare_task(name, *SAME[name], f"runs={tmp_path}", "data.seed=7")


CHANGING = {
    "augmentation": (
        "classification",
        ["task.mixup=0", "task.cutmix=0", "data.train_samples=40"],
        "data.augment changes images in every epoch (min_scale",
    ),
    "mixup": ("classification", [*PLAIN, "data.train_samples=40", "task.mixup=0.2"], "task.mixup mixes other images"),
    "windows": (
        "language_modeling",
        ["data.train_samples=null", "task.teacher.top_k=5"],
        "or fix them with data.train_samples=N",
    ),
    "fresh scenes": ("captioning", ["task.teacher.top_k=5"], "other samples are read in every epoch"),
}


@pytest.mark.sample(plain=1, slow=4)
@pytest.mark.parametrize("case", CHANGING)
def test_inputs_that_change_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, options, reason = CHANGING[case]
    task = build(name, *CACHED, *options, f"runs={tmp_path}")
    message = f"task.teacher.cache: .*{re.escape(reason)}.*, or set task.teacher.cache=false"
    with pytest.raises(UserError, match=message):
        task.distillation.prepare()
    assert not [*tmp_path.rglob("*.npz")]


def test_captions_that_are_drawn_anew_are_refused() -> None:
    def record(item: str, epoch: int) -> Record:
        return Record(item, {"captions": [f"{item} {epoch}"]})

    field: Any = SimpleNamespace(identity=lambda record: record["captions"])
    task: Any = SimpleNamespace(fields={"captions": field})
    with pytest.raises(
        UserError, match=r"task\.teacher\.cache: other texts .*; set data\.source\.captions_per_image=null"
    ):
        check_cacheable(task, ListSplit(["a", "b"], record))
    check_cacheable(task, ListSplit(["a", "b"], lambda item, epoch: record(item, 0)))


def test_all_of_many_outcomes_are_not_stored() -> None:
    task: Any = SimpleNamespace(data=SimpleNamespace(cache_folder=Path()))
    with pytest.raises(UserError, match=r"would store .* 50,000 outcomes .*; set task\.teacher\.top_k=64"):
        PredictionCache(task, lambda batch: iter(()), ("hash", "2.0", "None"), 50_000)


def test_rows_are_found_by_name_and_damaged_files_are_computed_again(tmp_path: Path) -> None:
    found = {
        name: [np.full((count, 3), value, np.float32), np.full((count, 2), value, np.int32)]
        for name, count, value in (("a", 2, 1), ("b", 0, 2), ("c", 3, 4))
    }
    arrays = to_arrays(found)
    cache: Any = PredictionCache.__new__(PredictionCache)
    cache.path, cache.bounds = tmp_path / "x.npz", {"a": (0, 2), "b": (2, 2), "c": (2, 5)}
    cache.logprobs, cache.outcomes = arrays["logprobs"], arrays["outcomes"]
    top = cache.look_up(["c", "b", "a"], 5, torch.device("cpu"))
    assert top.logprobs[:, 0].tolist() == [4, 4, 4, 1, 1] and top.outcomes[:, 0].tolist() == [4, 4, 4, 1, 1]
    for names, count, reason in (
        (["d"], 1, "d could not be read when"),
        (["c"], 2, "the tokens of c or another sample"),
    ):
        with pytest.raises(UserError, match=f"{reason}.*; remove .*x.npz"):
            cache.look_up(names, count, torch.device("cpu"))
    np.savez(cache.path, **arrays)
    stored = read_arrays(cache.path)
    assert stored is not None and stored["counts"].tolist() == [2, 0, 3] and stored["names"].tolist() == ["a", "b", "c"]
    cache.path.write_bytes(cache.path.read_bytes()[:-40])
    assert read_arrays(cache.path) is None and read_arrays(tmp_path / "none.npz") is None
    with pytest.raises(UserError, match="no training sample can be read"):
        to_arrays({})
