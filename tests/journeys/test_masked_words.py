"""From masked words to a classifier that starts with what was learned of them."""

import torch
from journey import only_run
from small import command

from vlm.training.run.fit import main

OPTIONS = ["data.max_len=96", "trainer.precision=32-true", "test=false"]


def test_a_classifier_starts_from_masked_words(tmp_path, capsys):
    masked = command("masked_language_modeling", *OPTIONS, "trainer.max_epochs=1", f"runs={tmp_path / 'masked'}")
    assert main(masked) == 0
    run = only_run(tmp_path / "masked")
    start = ["tokenizer=pretrained", f"tokenizer.path={run}", f"model.encoder.init_from={run}"]  # words are learnt anew
    start += ["trainer.max_steps=2", "optim.lr=0.0", "callbacks.ema=null"]
    capsys.readouterr()
    assert main(command("text_classification", *OPTIONS, *start, f"runs={tmp_path / 'class'}")) == 0
    assert "another tokenizer" not in capsys.readouterr().out
    states = [
        torch.load(next(place.glob(f"checkpoints/{name}.ckpt")), weights_only=True)["state_dict"]
        for place, name in ((run, "best"), (only_run(tmp_path / "class"), "last"))
    ]
    learned, taken = (
        {name: tensor for name, tensor in state.items() if name.startswith("model.encoder.")} for state in states
    )
    types = {"model.encoder.type_embed.weight"}
    assert taken.keys() == learned.keys() and len(taken) > 10
    assert all(torch.equal(taken[name], learned[name]) for name in taken.keys() - types)
