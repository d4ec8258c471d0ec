"""Adapters in the place of weights: checkpoints of them alone, which know their base, and exact resumes."""

import os
import shutil
import signal
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import pytest
import torch
from hugging import ENCODERS, photos, save_parts, saved_bert, saved_captioner
from small import COMMON
from transformers import BertModel

from vlm.checkpoint.file import read_file
from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run as vlm
from vlm.nn.lora import LoRA
from vlm.training.callbacks.progress import ShowFirstBatch
from vlm.training.run.fit import main

SIZES = ["data.source.train_scenes=16", "data.source.val_scenes=4", "data.source.test_scenes=4", "data.batch_size=4"]
SHORT = [*SIZES, "task.val_captions=2", "task.max_tokens=4", "data.max_len=16", "trainer.max_epochs=2", "test=false"]
LORA = ["model/adapt=lora", "model.adapt.rank=2", "model.adapt.alpha=3", "optim.lr=0.1"]


def run(runs, *overrides):
    """The folder of checkpoints of a run."""
    assert main([*COMMON, *SHORT, *LORA, *overrides, f"runs={runs}"]) == 0
    return next(runs.glob("*/20*")) / "checkpoints"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs") / "vit-gpt2"
    saved_captioner(folder, side=32)
    return folder


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """The checkpoints of a run, and what it printed."""
    with redirect_stdout(StringIO()) as printed:
        return run(tmp_path_factory.mktemp("runs"), "model=pretrained", f"model.path={folder}"), printed


@pytest.fixture
def trained(finished):
    return finished[0]


@pytest.mark.slow
def test_a_checkpoint_holds_adapters_alone_and_is_used_with_its_base(folder, trained):
    path = trained / "last.ckpt"
    own, base, whole = read_file(path), read(folder)["state_dict"], read(path)["state_dict"]
    assert all(".lora_" in name for entry in ("state_dict", "ema") for name in own[entry])
    learnt, changed = own["ema"], set()
    for name, tensor in whole.items():
        stem, before = name.removesuffix("weight"), base[name][: len(tensor)]
        if f"{stem}lora_a" in learnt:
            before = before + 3 / 2 * learnt[f"{stem}lora_b"] @ learnt[f"{stem}lora_a"]
            changed.add(name.split(".")[-2])
            assert not torch.equal(tensor, base[name])
        torch.testing.assert_close(tensor, before, rtol=1e-6, atol=1e-7)
    assert changed == {"qkv", "q", "kv", "proj"}
    assert len(learnt) == 2 * sum(name.split(".")[-2] in changed and name.endswith("weight") for name in whole)


@pytest.mark.slow
def test_merged_weights_write_as_adapters_beside_them_do(trained):
    path = trained / "best.ckpt"
    merged, apart = load_model(read(path)), read(path, merge=False)
    base = {name: tensor for name, tensor in apart["state_dict"].items() if ".lora_" not in name}
    beside = load_model({**apart, "state_dict": base})
    assert LoRA(rank=2, alpha=3, projections=["qkv", "q", "kv", "proj"]).adapt(beside) == apart["adapters"]["layers"]
    beside.load_state_dict({name.removeprefix("model."): one for name, one in apart["state_dict"].items()})
    images, tokens = torch.randn(2, 3, 32, 32), torch.randint(5, 200, (2, 7))
    logits = [model.head(model(images, tokens)) for model in (merged, beside.eval())]
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-5)
    assert type(merged.decoder.blocks[0].attn.qkv) is torch.nn.Linear


def test_the_share_that_learns_is_printed(folder, finished):
    path, lines = finished[0] / "last.ckpt", finished[1].getvalue().splitlines()
    line = next(line for line in lines if line.startswith("adapters of 14 layers"))
    learns = sum(tensor.numel() for tensor in read_file(path)["state_dict"].values())
    every = sum(tensor.numel() for tensor in read(path, merge=False)["state_dict"].values())
    assert f"{learns:,} of {every:,} parameters are trained ({learns / every:.2%})" in line
    assert line.endswith(f"checkpoints leave the others to {folder}")


@pytest.mark.slow
def test_a_frozen_new_part_does_not_count_as_learning(tmp_path, capsys):
    saved_bert(tmp_path / "bert", BertModel)
    short = ["trainer.max_steps=1", "data.batch_size=4", "test=false", *COMMON, f"runs={tmp_path / 'runs'}"]
    pretrained = ["task=tagging", "model=pretrained", f"model.path={tmp_path / 'bert'}", "model/adapt=lora"]
    assert main([*short, *pretrained, "task.freeze=[head]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    adapted, all_parts = (
        next(line for line in lines if line.startswith(name)) for name in ("adapters of", "parameters")
    )
    assert adapted.split()[4] == all_parts.split()[-3]


@pytest.fixture
def caption(tmp_path, capfd):
    """Runs `vlm caption` with a checkpoint: its status, and the lines on either side."""
    paths = photos(tmp_path / "photos", 2)

    def caption(path):
        capfd.readouterr()
        status = vlm(["caption", *paths, "-c", str(path)])
        return status, *(text.splitlines() for text in capfd.readouterr())

    return caption


@contextmanager
def move_away(folder):
    """Has a folder away for a while."""
    away = folder.with_name("away")
    folder.rename(away)
    try:
        yield away
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        away.rename(folder)


@pytest.mark.slow
def test_the_command_finds_the_base_where_it_was_or_beside(folder, trained, caption):
    before = caption(trained / "best.ckpt")
    assert before[0] == 0 and len(before[1]) == 2
    with move_away(folder) as away:
        status, _, errors = caption(trained / "best.ckpt")
        assert status == 2 and len(errors) == 1
        assert f"holds adapters of {folder}, which is missing; put it there, or at {trained / 'base'}" in errors[0]
        shutil.copytree(away, trained / "base")
        assert caption(trained / "best.ckpt") == before
        shutil.rmtree(trained / "base")


def test_another_base_is_refused(trained, folder, caption):
    with move_away(folder):
        torch.manual_seed(1)  # each test begins with the seed that the folder was drawn with
        saved_captioner(folder, side=32)
        status, _, errors = caption(trained / "best.ckpt")
    assert status == 2 and len(errors) == 1
    assert "its adapters were trained on other weights than" in errors[0]


@pytest.mark.slow
def test_adapters_and_their_base_become_one_file(trained, folder, tmp_path, capfd):
    path, one = trained / "best.ckpt", tmp_path / "one.ckpt"
    assert vlm(["import", str(path), "--out", str(one)]) == 0
    mine, before = read_file(one)["state_dict"], read(path)["state_dict"]
    assert mine.keys() == before.keys() and all(torch.equal(tensor, before[name]) for name, tensor in mine.items())
    assert vlm(["info", "-c", str(path)]) == 0
    assert f"adapters    of 14 layers, changing {folder} (" in capfd.readouterr().out
    assert vlm(["import", str(one), "--out", str(tmp_path / "two.ckpt")]) == 2
    assert "has no adapters to merge" in capfd.readouterr().err


def interrupt_run(runs, options, monkeypatch):
    """The checkpoints of a run that was stopped in its sixth step and went on."""

    def send(audit, trainer, *args):
        if trainer.global_step == 5 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    sent = []
    with monkeypatch.context() as patch:
        patch.setattr(ShowFirstBatch, "on_train_batch_start", send)
        assert main([*COMMON, *SHORT, *LORA, *options, f"runs={runs}"]) == 143
    place = next(runs.glob("*/20*"))
    assert all(".lora_" in name for name in read_file(place / "checkpoints" / "last.ckpt")["state_dict"])
    assert main([f"resume={place}"]) == 0
    return place / "checkpoints"


@pytest.mark.slow
def test_resume_is_exact(folder, trained, tmp_path, monkeypatch):
    place = interrupt_run(tmp_path, ["model=pretrained", f"model.path={folder}"], monkeypatch)
    for name in ("last.ckpt", "best.ckpt"):
        mine, reference = read_file(place / name), read_file(trained / name)
        assert mine["global_step"] == reference["global_step"]
        for entry in ("state_dict", "ema") if name == "last.ckpt" else ("state_dict",):
            assert mine[entry].keys() == reference[entry].keys()
            assert all(torch.equal(tensor, reference[entry][key]) for key, tensor in mine[entry].items())


@pytest.mark.slow
def test_weights_that_no_base_has_learn_whole_and_are_kept(tmp_path):
    save_parts(tmp_path / "theirs", ENCODERS["vit"]())
    scenes = [text for text in SHORT if not text.startswith(("task.", "data.max_len"))]
    options = [*COMMON, *scenes, *LORA, "model=pretrained", f"model.path={tmp_path / 'theirs'}", "task=classification"]
    assert main([*options, "data.source.image_size=32", f"runs={tmp_path / 'runs'}"]) == 0
    path = next((tmp_path / "runs").rglob("best.ckpt"))
    kept = {name for name in read_file(path)["state_dict"] if ".lora_" not in name}
    assert kept == {"model.head.weight", "model.head.bias"}
    load_model(read(path))


@pytest.mark.slow
def test_a_model_of_ours_is_adapted(tmp_path, capfd):
    plain = [text for text in LORA if "adapt" not in text]
    assert main([*COMMON, *SHORT, *plain, f"runs={tmp_path / 'first'}"]) == 0
    base = next((tmp_path / "first").glob("*/20*"))
    path = run(tmp_path / "second", f"model.init_from={base}") / "best.ckpt"
    before, after = read(base)["state_dict"], read(path)["state_dict"]
    changed = {name.split(".")[-2] for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"qkv", "q", "kv", "proj"}
    assert main([*COMMON, *SHORT, *LORA, f"model.init_from={path}", f"runs={tmp_path / 'third'}"]) == 2
    assert f"{path}: holds only adapters and cannot be a base; vlm import" in capfd.readouterr().err


@pytest.mark.slow
def test_adapters_without_a_base_are_refused(tmp_path, capfd):
    assert main([*COMMON, *SHORT, *LORA, f"runs={tmp_path}"]) == 2
    assert "model.adapt needs pretrained weights; set" in capfd.readouterr().err
