"""Every fault of a config is told in a line, with status 2, before data is touched and with nothing created."""

import os
import sys

import pytest

from vlm.training.run.fit import main

# Of each fault: the overrides, and what is said: the key, and the nearest right name where there is one.
CAPTIONING = [
    (["modle.size.dim=32"], ["modle", "did you mean model?"]),
    (["model.decoder.num_haeds=2"], ["model.decoder.num_haeds", "did you mean num_heads?"]),
    (["model=tinny"], ["model=tinny", "did you mean tiny?"]),
    (["model/encoder=vitt"], ["model/encoder=vitt", "did you mean vit?"]),
    (["optim.lrr=1"], ["optim.lrr", "did you mean lr?"]),
    (["optim.lr=fast"], ["optim.lr", "'fast'", "expected float"]),
    (["optim.betas=[0.9]"], ["optim.betas", "expected"]),
    (["lr=0.1"], ["lr", "did you mean optim.lr?"]),
    (["seed=one"], ["seed", "'one'", "expected int"]),
    (["seed=1,2"], ["seed=1,2", "has several values"]),
    (["trainer.max_epoch=3"], ["trainer.max_epoch", "did you mean max_epochs?"]),
    (["callbacks.checkpoints.mode=most"], ["callbacks.checkpoints.mode", "choose from min, max"]),
    (["model.encoder.num_heads=5"], ["model.encoder.num_heads", "does not divide dim"]),
    (["model.position.dim=3"], ["model.position.dim: 3 differs from dim, 96"]),
    (["model.encoder.patch_size=15"], ["patch_size", "does not divide image_size"]),
    (["data=drawn_lines", "data.image_size=[32,100]"], ["patch_size: 8 does not divide image_size, [32, 100]"]),
    (["data.image_size=[32,64,3]"], ["data.image_size: [32, 64, 3]", "expected int | tuple[int, int]"]),
    (["data.batch_size=0"], ["data.batch_size", "at least 1"]),
    (["data.max_len=0"], ["data.max_len", "at least 3"]),
    (["tokenizer.vocab_size=7"], ["tokenizer.vocab_size", "raise it"]),
    (["tokenizer.model_type=words"], ["tokenizer.model_type", "'words'"]),
    (["+data.preprocess.resize=fit"], ["resize", "crop, crop_down, squash, pad"]),
    (["data=captions"], ["data.root", "missing"]),
    (["data=captions", "data.root=absent"], ["data.root=absent", "no such folder"]),
    (["+model.encoder._target_=os.system"], ["model.encoder._target_"]),
    (["optim._target_=os.system"], ["optim._target_", "may not be built"]),
    (["task._target_=vlm.tasks.captioning.train.Captoning"], ["task._target_", "did you mean"]),
    (["+logger.csv.folder=/tmp"], ["logger.csv.folder", "set by the program"]),
    (["name=${nothing.here}"], ["name", "nothing.here"]),
    (["--epochs", "5"], ["--epochs", "KEY=VALUE"]),
    (["captioning"], ["captioning", "KEY=VALUE"]),
    (["resume=absent"], ["resume=absent", "no such run"]),
    (["resume=last"], ["resume=last", "no run"]),
]
CLASSIFICATION = [
    (["task.mixpu=0.1"], ["task.mixpu", "did you mean mixup?"]),
    (["data=image_folder", "data.root=absent"], ["data.root=absent", "no such folder"]),
    (["data=image_tar", "data.path=absent.tar"], ["data.path=absent.tar", "no such file"]),
    (["model.pool=max"], ["model.pool", "'max'"]),
    (["data.repeats=3", "data.batch_size=32"], ["data.repeats", "does not divide"]),
    (["data=image_folder"], ["data.root", "has no value; give data.root="]),
    (["data=mnist"], ["model.encoder.patch_size", "16 does not divide image_size, 28"]),
    (["model.pool=class"], ["class_token=true"]),
    (["task.mixup=-1"], ["task.mixup", "at least 0"]),
    (["data.augment.policy=strong"], ["policy='strong'"]),
]
LANGUAGE_MODELING = [
    (["data=text"], ["data.path"]),
    (["data=text", "data.path=absent.txt"], ["data.path=absent.txt", "no such file"]),
    (["data.stride=100000"], ["data.stride"]),
]
TASKS = {"captioning": CAPTIONING, "classification": CLASSIFICATION, "language_modeling": LANGUAGE_MODELING}
FAULTS = [(task, *fault) for task, faults in TASKS.items() for fault in faults]
FIRST = "optim.lrr=1 data=captions data=mnist model.pool=class data=text data.stride=100000"  # not slow
FAULTS = [fault if fault[1][0] in FIRST.split() else pytest.param(*fault, marks=pytest.mark.slow) for fault in FAULTS]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLM_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])


def argv(task, overrides):
    alone = overrides[0].startswith(("resume=", "-"))
    return overrides if alone else [f"task={task}", "trainer=cpu", *overrides]


@pytest.mark.parametrize(("task", "overrides", "expected"), FAULTS)
def test_a_fault_is_told_and_nothing_is_created(task, overrides, expected, tmp_path, capfd):
    assert main(argv(task, overrides)) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("error: ")
    assert all(part in said.err for part in expected), said.err
    assert len(said.err.splitlines()) <= 3 and "Traceback" not in said.err
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_all_faults_are_told_at_once(tmp_path, capfd):
    wrong = {"model.encoder.dpeth": "3", "optim.lr": "fast", "trainer.max_epoch": "3", "data": "flikr8k", "seed": "one"}
    assert main(["task=captioning", *(f"{key}={value}" for key, value in wrong.items())]) == 2
    said = capfd.readouterr().err
    assert all(key in said for key in wrong) and "data=flikr8k" in said
    assert os.listdir(tmp_path) == []


# Of each value out of its range: the override, the key that is named, and its range.
RANGES = [
    ("optim.lr=-1", "optim.lr", "at least 0"),
    ("optim.lr=nan", "optim.lr", "not finite"),
    ("optim.lr=inf", "optim.lr", "not finite"),
    ("optim.betas=[2,3]", "optim.betas", "at least 0 and below 1"),
    ("data.num_workers=1000000", "data.num_workers", "at most 1024"),
    ("data.max_len=1", "data.max_len", "at least 3"),
    ("model.size.dropout=1.5", "model.size.dropout", "below 1"),
    ("trainer.max_epochs=0", "trainer.max_epochs", "at least 1, or -1"),
    ("trainer.limit_train_batches=-1", "trainer.limit_train_batches", "above 0"),
    ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches", "at least 1"),
    ("trainer.val_check_interval=0", "trainer.val_check_interval", "above 0"),
    ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val", "at least 0"),
    ("callbacks.checkpoints.every_n_steps=0", "callbacks.checkpoints.every_n_steps", "at least 1"),
    ("callbacks.bad_samples.limit=3", "callbacks.bad_samples.limit", "at most 1"),
    ("task.max_tokens=0", "task.max_tokens", "at least 1"),
    ("seed=-1", "seed", "at least 0"),
    ("name=", "name", "the name of a folder"),
    ("name=../../x", "name", "the name of a folder"),
    ("=", "=", "KEY=VALUE"),
]


ORDERS = (RANGES[:-1], RANGES[-2::-1], RANGES[1:2], RANGES[-1:])
ROUNDS = [{key: (text, range) for text, key, range in order} for order in ORDERS]


@pytest.mark.parametrize("faults", ROUNDS, ids=["the last of each key", "the first", "nan", "="])
def test_values_out_of_range_are_refused_by_the_keys_that_were_typed(faults, tmp_path, capfd):
    assert main(["trainer=cpu", *(text for text, _ in faults.values())]) == 2
    lines = capfd.readouterr().err.removeprefix("error: ").splitlines()
    assert len(lines) == len(faults)
    for key, (_, range) in faults.items():
        (line,) = [line for line in lines if line.strip().startswith(f"{key}: ")]
        assert range in line
    assert os.listdir(tmp_path) == []


def test_the_help_names_resume(capfd):
    assert main(["--help"]) == 0
    assert "resume=RUN" in capfd.readouterr().out
