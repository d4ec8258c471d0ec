"""Faults of a config are reported before torch is imported, in the words of the check with the real libraries."""

import json
import subprocess
import sys

import pytest

from vlm.config.command import run
from vlm.config.compose import compose
from vlm.errors import UserError
from vlm.training.config.check import check

# Composes each config as a command line does; prints its fault, or its config, and whether torch is imported.
SCRIPT = """
import json, sys
from vlm.config.command import run
from vlm.config.compose import compose
from vlm.config.early import compose_early
from vlm.errors import UserError
import vlm.training.run.fit
from vlm.training.config.check import check

for overrides in json.loads(sys.argv[1]):
    try:
        found = compose_early(lambda: compose(overrides, check))
    except UserError as fault:
        found = str(fault)
    print(json.dumps([found, "torch" in sys.modules]))
"""
FAULTS = [
    ["optim.lrr=1"],
    ["model.encoder.dpeth=6", "optim.lrr=1e-3"],
    ["trainer.precision=bad"],
    ["trainer.max_epochs=abc"],
    ["task=captionin"],
    ["experiment=fooo"],
    ["data=captionz"],
    ["trainer.acelerator=gpu"],
    ["trainer.devices=-3", "data.batch_size=0", "optim.betas=[1,2,3]", "trainer.gradient_clip_val=-1"],
    ["optim._target_=torch.optim.AdamX"],
    ["optim._target_=torch.optim.SGD"],
    ["model._target_=vlm.models.nope.X"],
    ["logger.tensorboard.nam=x", "callbacks.samples.every=no"],
    ["task=text_classification", "data=texts"],
    ["task=conversations", "data.seed=-1", "schedule.warmup=x"],
    ["task=span_answering", "task.label_smoothing=2", "tokenizer.vocab_size=x"],
    ["task.reward=cider"],
    ["model.encoder=5"],
    ["~optim"],
]
VALID = [[f"task={name}"] for name in ("captioning", "tagging", "language_modeling", "contrastive")]


def found_early(configs):
    command = [sys.executable, "-c", SCRIPT, json.dumps(configs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def fault_of(overrides):
    with pytest.raises(UserError) as caught:
        compose(overrides, check)
    return str(caught.value)


def test_two_typos_are_reported_at_once_without_torch():
    assert found_early(FAULTS[1:2]) == [[fault_of(FAULTS[1]), False]]


@pytest.mark.slow
def test_faults_have_the_words_of_the_real_check():
    for overrides, (found, imported) in zip(FAULTS, found_early(FAULTS), strict=True):
        assert found == fault_of(overrides) and not imported, overrides


@pytest.mark.slow
def test_valid_configs_pass_as_they_are():
    for overrides, (found, imported) in zip(VALID, found_early(VALID), strict=True):
        assert found == json.loads(json.dumps(compose(overrides, check))) and not imported, overrides


def test_what_needs_the_libraries_is_left_to_them():
    """A function of torch raises no fault in the early check, even if its caller makes a UserError of any exception."""
    script = """
from vlm.config.early import compose_early
from vlm.errors import UserError

def computes():
    import torch
    try:
        return torch.zeros(3)
    except Exception as fault:
        raise UserError("wrong") from fault

assert compose_early(computes) is None
import torch
assert torch.zeros(3).sum() == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_missing_run_is_reported_without_torch(tmp_path):
    script = "import sys; from vlm.training.run.fit import main; print(main(['resume=nope']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "2 False\n" and "resume=nope: no such run or checkpoint" in done.stderr


def test_faults_of_what_was_not_typed_are_left_to_the_real_check(monkeypatch):
    """A stand-in may lack something that a shipped config names; then the config must not be refused."""

    def fail(make):
        raise UserError("callbacks.samples: unknown")

    monkeypatch.setattr("vlm.config.command.compose_early", fail)
    configs = []
    assert run(configs.append, ["task=captioning"]) == 0 and configs[0]["task"]["_target_"]
    assert run(configs.append, ["callbacks.samples=null"]) == 2 and len(configs) == 1
