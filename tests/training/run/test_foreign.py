"""Evaluating what no run of ours trained: the figures are those of the checkpoint that was exported."""

import json
from pathlib import Path

import pytest
from hugging import saved_captioner

from vlm.checkpoint.load import read
from vlm.cli.main import run as command
from vlm.tasks.captioning.predict import Captioner
from vlm.tasks.shared.text_tasks import TextSearch
from vlm.training.run.evaluate import compose_for_model

SCENES = ["data.source.test_scenes=12", "data.source.train_scenes=20"]


def figures(place: Path, out: Path, *overrides: str) -> dict[str, float]:
    assert command(["evaluate", "-c", str(place), "--out", str(out), "--device", "cpu", *SCENES, *overrides]) == 0
    return json.loads((out / "metrics.json").read_text())


@pytest.mark.slow
def test_an_exported_captioner_scores_as_its_checkpoint(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    path = pytestconfig.rootpath / "data/sample/captioner.ckpt"
    folder, imported = tmp_path / "ex", tmp_path / "i.ckpt"
    assert command(["export", str(folder), "-c", str(path)]) == 0
    assert command(["import", str(folder), "--out", str(imported)]) == 0
    truth = figures(path, tmp_path / "a")
    assert truth["test/cider"] > 1
    assert figures(folder, tmp_path / "b", "task=captioning") == figures(imported, tmp_path / "c") == truth


@pytest.mark.slow
def test_a_folder_is_evaluated_by_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is that of `vlm caption`, but for what the user overrides."""
    saved_captioner(tmp_path / "theirs", generation={"num_beams": 3, "max_length": 12, "no_repeat_ngram_size": 1})
    searches, follow = [], TextSearch.use_stored_options
    monkeypatch.setattr(
        TextSearch, "use_stored_options", lambda self, *args: searches.append((follow(self, *args), self.search))
    )
    for overrides in ([], ["task.beam=2"]):
        figures(tmp_path / "theirs", tmp_path / f"out{len(overrides)}", "data.source.image_size=32", *overrides)
    captioner = Captioner(str(tmp_path / "theirs"))
    (_, own), (_, other) = searches
    assert own == captioner.build_decoding(captioner.options())
    assert other == captioner.build_decoding(captioner.options(beam=2)) != own


@pytest.mark.parametrize("task", ["captioning", "classification", "contrastive"])
def test_a_model_may_see_images_of_any_size(task: str) -> None:
    about = {"task": task, "model": {}, "preprocess": {"image_size": 378}}
    assert compose_for_model("folder", about, [])["data"]["image_size"] == 378


@pytest.mark.parametrize("override", ["task=classification", "task=tagging"])
def test_another_task_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str) -> None:
    saved_captioner(tmp_path / "theirs")
    assert command(["evaluate", "-c", str(tmp_path / "theirs"), override]) == 2
    assert "is a model for captioning; leave the override out" in capsys.readouterr().err
    assert "config" not in read(tmp_path / "theirs")["vlm"]
