"""What the config of a checkpoint may not do, and what a refusal advises."""

from pathlib import Path

import pytest

from vlm.checkpoint.stored import isolate_config


@pytest.mark.parametrize("arguments", [{}, {"download": True}])
def test_a_source_of_a_checkpoint_downloads_nothing(arguments, tmp_path):
    source = {"_target_": "vlm.data.sources.torchvision_sets.TorchvisionSet", "name": "MNIST", "root": "x", **arguments}
    assert isolate_config({"data": {"source": source}, "runs": "runs"}, tmp_path)["data"]["source"]["download"] is False


def test_a_checkpoint_puts_no_cache_but_beside_those_of_other_runs(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "name" / "time"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for runs in ("/", "/tmp", "..", "../..", "elsewhere", "runs"):
        assert isolate_config({"runs": runs, "data": {}}, folder)["runs"] == str(folder)
    Path("runs/cache").mkdir()
    assert isolate_config({"runs": "runs", "data": {}}, folder)["runs"] == "runs"
