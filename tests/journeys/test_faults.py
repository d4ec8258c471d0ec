"""What a user gets wrong, and what they are told."""

import pytest

from vlm.cli.main import run
from vlm.training.run.fit import main

FAULTS = [
    ("captioning", "model=classifier_tiny", "model: Classifier does not fit task=captioning, ", "needs a VisionLangu"),
    ("classification", "model=lm_tiny", "model: Decoder does not fit task=classification, ", "needs a Classifier;"),
    ("language_modeling", "model=tiny", "model: VisionLanguageModel does not fit task=la", "needs a TextDecoder;"),
    ("captioning", "data=shapes_classes", "data: ", "while task=captioning reads "),
    ("classification", "data=shapes_text", "data: ", "while task=classification reads "),
    ("language_modeling", "data=shapes", "data: ", "while task=language_modeling reads "),
]


@pytest.mark.parametrize(("task", "given", "start", "said"), FAULTS)
def test_a_part_for_another_task_is_refused_before_data_are_read(
    task, given, start, said, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("vlm.training.run.run.build_data", lambda config: pytest.fail("data were read"))
    assert main([f"task={task}", given, f"runs={tmp_path / 'runs'}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {start}") and said in err
    assert len(err.splitlines()) <= 2 and "Traceback" not in err and not (tmp_path / "runs").exists()


def test_sources_are_named_where_data_have_no_path(capsys) -> None:
    assert main(["task=masked_language_modeling", "data=joined_texts", "data.path=x"]) == 2
    assert "data.path: not a key of this data set; it has data.source.sources" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "check-data"])
def test_the_name_of_an_option_alone_is_completed(command, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([command, "captions"]) == 2 and "write data=captions" in capsys.readouterr().err
    assert run([command, "conversations"]) == 2
    assert "write data=conversations or task=conversations" in capsys.readouterr().err


def test_a_size_that_nothing_gives_is_named(tmp_path, capsys) -> None:
    """Data and model suit the task here: what is wrong is the reference itself."""
    assert main(["model.size.dim=${data.width}", f"runs={tmp_path / 'runs'}"]) == 2
    said = capsys.readouterr().err
    assert "data.width" in said and "does not fit" not in said and len(said.splitlines()) <= 2


@pytest.mark.parametrize("group", ["model", "data", "optim", "schedule", "trainer", "logger", "task"])
def test_a_group_that_is_taken_away_is_named(group, tmp_path, capsys) -> None:
    """As Hydra reads an empty list; the task still sets keys of the trainer."""
    assert main([f"{group}=[]", f"runs={tmp_path / 'runs'}"]) == 2
    assert f"{group}: is required; leave out {group}=[]" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
