"""Training from a Hugging Face folder: nothing of its sizes, tokenizer and preprocessing is typed."""

import pytest
from hugging import saved_captioner, saved_gpt2
from small import COMMON

from vlm.checkpoint.load import read
from vlm.errors import UserError
from vlm.inference.captioning import Captioner
from vlm.training.fit import main
from vlm.training.pretrained import spell_out

STEPS = ["trainer.max_steps=2", "test=false", "data.source.train_scenes=16", "data.source.val_scenes=4"]


def trained(tmp_path, *overrides):
    """The checkpoint of a short run."""
    assert main([*COMMON, *overrides, f"runs={tmp_path / 'runs'}"]) == 0
    return next((tmp_path / "runs").rglob("last.ckpt"))


def test_a_captioner_is_fine_tuned_with_nothing_typed(tmp_path, capfd):
    folder = tmp_path / "a folder, (theirs)"
    theirs, *_ = saved_captioner(folder, side=32)
    frozen = ["optim.lr=0", "callbacks.ema=null", "task.val_captions=2", "task.max_tokens=4", "data.max_len=16"]
    path = trained(tmp_path, "model=pretrained", f"model.path={folder}", *STEPS, *frozen)
    assert "tensors taken" in capfd.readouterr().out
    ours, before = read(path), read(folder)
    for name, tensor in ours["state_dict"].items():
        assert tensor.equal(before["state_dict"][name][: len(tensor)]), name
    assert ours["vlm"]["tokenizer"] == before["vlm"]["tokenizer"]
    assert ours["vlm"]["preprocess"] == before["vlm"]["preprocess"]
    assert Captioner(str(path)).tokenizer.eos_id == theirs.generation_config.eos_token_id


def test_a_language_model_is_fine_tuned_too(tmp_path):
    folder = tmp_path / "theirs"
    saved_gpt2(folder)
    sizes = [
        "data.source.train_documents=10",
        "data.source.val_documents=3",
        "data.train_samples=16",
        "data.max_len=32",
    ]
    path = trained(
        tmp_path,
        "model=pretrained",
        f"model.path={folder}",
        "trainer.max_steps=2",
        "test=false",
        "data.max_len=32",
        *sizes,
    )
    assert read(path)["vlm"]["tokenizer"]["class"] == "BytePairTokenizer"


def test_both_are_needed():
    twice, empty = ["model=pretrained", "model.path=x", "model.path=y"], ["model=pretrained", "model.path="]
    for overrides in (["model=pretrained"], ["model.path=x"], twice, empty):
        with pytest.raises(UserError, match="go together"):
            spell_out(overrides)
    assert spell_out(["model=tiny", "seed=1"]) == ["model=tiny", "seed=1"]
