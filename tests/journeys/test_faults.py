"""What a user gets wrong, and what they are told."""

from typing import Any

import pytest

from vlm.training.run.fit import main

MODELS = {"captioning": "VisionLanguageModel", "classification": "Classifier", "language_modeling": "Decoder"}
NEEDS = MODELS | {"language_modeling": "TextDecoder"}  # any of them
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
    assert f"needs a {NEEDS[task]};" in said and len(said.splitlines()) <= 2 and "Traceback" not in said
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


@pytest.mark.parametrize("group", ["model", "data", "optim", "schedule", "trainer", "logger", "task"])
def test_a_group_that_is_taken_away_is_named(group, tmp_path, capsys) -> None:
    """As Hydra reads an empty list; the task still sets keys of the trainer."""
    assert main([f"{group}=[]", f"runs={tmp_path / 'runs'}"]) == 2
    assert f"{group}: every run has one; leave out {group}=[]" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
