"""Data that moved after a training: an override of the short key reaches all that it fed when the run was composed."""

import pytest

from vlm.checkpoint.stored import freeze, thaw
from vlm.cli.main import run as vlm
from vlm.config.compose import compose, override
from vlm.errors import UserError
from vlm.training.config.overrides import check_effective
from vlm.training.run.evaluate import is_ignored
from vlm.training.run.fit import main


def test_root_and_path_of_a_saved_config_reach_the_source():
    saved = thaw(freeze(compose(["data=captions", "data.root=/old"]).tree))
    given = ["data.root=/elsewhere", "data.path=file.csv"]
    got = override(saved.tree, given)
    check_effective(saved, given, is_ignored)
    assert (got["data"]["source"]["root"], got["data"]["source"]["path"]) == ("/elsewhere", "file.csv")
    assert thaw(freeze(got.tree)) == got
    for text in ("data.root=/old", "data.path=null", "optim.lr=1", "data.image_size=224"):
        with pytest.raises(UserError, match="changes nothing"):
            check_effective(saved, [text], is_ignored)


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
