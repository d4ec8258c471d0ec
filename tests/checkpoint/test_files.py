"""Checkpoints that lie here are read by every later version, and give what they gave when they were made."""

import json

import pytest
import tiny_checkpoints as tiny
import torch

from vlm.checkpoint.load import read


def floats(value):
    """The numbers within plain containers, and the containers with a mark in their place."""
    if isinstance(value, float):
        return [value], "number"
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        parts = {key: floats(child) for key, child in items}
        return [x for numbers, _ in parts.values() for x in numbers], {key: rest for key, (_, rest) in parts.items()}
    return [], value


FIRST, *REST = tiny.TASKS


@pytest.mark.slow
@pytest.mark.parametrize("task", [FIRST, *(pytest.param(task, marks=pytest.mark.slow) for task in REST)])
def test_a_checkpoint_of_this_format_gives_what_it_gave(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tiny.FILES / f"{task}.ckpt"
    assert path.stat().st_size < 200_000
    kept, outputs = json.loads(path.with_suffix(".json").read_text()), tiny.outputs(task, path)
    outputs["metrics"] = {name: outputs["metrics"][name] for name in kept["metrics"]}  # there may be new ones
    numbers, rest = floats(outputs)
    expected, same = floats(kept)
    assert rest == same
    assert torch.allclose(torch.tensor(numbers), torch.tensor(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("task", tiny.TASKS)
def test_it_names_classes_by_short_names(task):
    loaded = read(tiny.FILES / f"{task}.ckpt")

    def names(value):
        if isinstance(value, dict):
            assert "_target_" not in value
            yield from (value[key] for key in ("_class_",) if key in value)
            for child in value.values():
                yield from names(child)

    found = set(names(loaded["vlm"]))
    assert {name for name in found if "." in name} <= {"torch.optim.AdamW", "lightning.Trainer"}
    assert len(found) > 10
