"""`logger=wandb`, offline."""

import builtins

import pytest

from vlm.training.run.fit import main

QUICK = ["debug=fast", "trainer=cpu", "callbacks.progress=null", "model.size.dim=32", "model.size.num_heads=2"]
QUICK += [f"data.source.{split}_scenes={count}" for split, count in (("train", 16), ("val", 8), ("test", 8))]


def test_without_the_package_a_line_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def import_without_wandb(name, *rest, **more):
        if name == "wandb":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", import_without_wandb)
    assert main(["logger=wandb", *QUICK, f"runs={tmp_path / 'runs'}"]) == 2
    assert capsys.readouterr().err == (
        'error: logger=wandb: the package wandb is not installed; pip install "vlm-lightning[wandb]", or logger=csv\n'
    )


@pytest.mark.slow
def test_a_run_offline_has_its_scores_its_config_and_its_samples_with_images(tmp_path):
    wandb = pytest.importorskip("wandb")
    assert main(["-m", "logger=wandb", "logger.wandb.offline=true", "seed=1,2", *QUICK, f"runs={tmp_path}"]) == 0
    wandb.teardown()  # waits until all is written
    for folder in (tmp_path / "captioning").iterdir():  # each job is a run of its own
        (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        assert len(list(folder.glob("wandb/offline-run-*/files/media/images/val/*.png"))) == 4
        records = file.read_bytes()
        for text in (folder.name, "test/loss", "images/separated", "vlm.training.step.optim.Muon"):
            assert text.encode() in records
