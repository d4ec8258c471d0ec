"""Data that moved after a training: an override of the short key reaches all that it fed when the run was composed."""

import pytest

from vlm.cli.main import run as vlm
from vlm.training.run.fit import main

pytestmark = pytest.mark.slow


def test_an_evaluation_reads_the_data_that_it_is_pointed_at(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("the cat sat on the mat. " * 40)
    (tmp_path / "two.txt").write_text("mat the on sat. cat the " * 25 + "tttt" * 60)
    run = ["task=language_modeling", "data=text", "data.path=one.txt", "data.max_len=16", "compile=false"]
    run += ["model.size.dim=16", "model.size.num_heads=2", "model.size.depth=1", "callbacks.progress=null"]
    assert main([*run, "trainer=cpu", "trainer.max_steps=4", "task.sampled_batches=2"]) == 0
    (best,) = tmp_path.glob("runs/*/*/checkpoints/best.ckpt")
    (tmp_path / "one.txt").rename(tmp_path / "moved.txt")
    capsys.readouterr()

    def scores(*overrides):
        assert vlm(["evaluate", "-c", str(best), "--device", "cpu", *overrides]) == 0
        return capsys.readouterr().out

    moved, other = scores("data.path=moved.txt"), scores("data.path=two.txt")
    assert moved != other == scores("data.source.path=two.txt")
    assert vlm(["evaluate", "-c", str(best), "--device", "cpu", "data.path=one.txt"]) == 2
    assert capsys.readouterr().err.startswith("error: data.path: is one.txt already")
