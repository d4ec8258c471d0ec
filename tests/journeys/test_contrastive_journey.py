"""From images with captions to a classifier that starts with what was learned of them."""

import torch
from journey import only_run
from small import command

from vlm.training.run.fit import main


def test_a_classifier_starts_from_contrastive_training(tmp_path, capsys):
    assert main(command("contrastive", "trainer.max_epochs=1", "test=false", f"runs={tmp_path / 'dual'}")) == 0
    run = only_run(tmp_path / "dual")
    start = [f"model.init_from={run}", "trainer.max_steps=2", "optim.lr=0.0", "callbacks.ema=null", "test=false"]
    capsys.readouterr()
    assert main(command("classification", *start, f"runs={tmp_path / 'class'}")) == 0
    assert "tensors loaded for model" in capsys.readouterr().out
    learned, taken = (
        torch.load(place / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]
        for place, name in ((run, "best"), (only_run(tmp_path / "class"), "last"))
    )
    encoder = [name for name in taken if name.startswith("model.encoder.")]
    assert len(encoder) > 10 and all(torch.equal(taken[name], learned[name]) for name in encoder)
