"""Faults of a config are reported before torch is imported, in the words of the check with the imported classes."""

import json
import random
import subprocess
import sys
from copy import deepcopy
from functools import cache, partial
from pathlib import Path

import pytest

from vlm.config import override
from vlm.config.build import arguments_of, injects
from vlm.config.compose import compose
from vlm.config.signatures import read_signature
from vlm.config.target import signature
from vlm.config.tree import put, resolve, select, walk
from vlm.errors import UserError
from vlm.training.config import check as checks

TASKS = sorted(path.stem for path in (Path(__file__).parents[3] / "conf" / "task").glob("*.yaml"))
FAULTS = [
    ["optim.lrr=1"],
    ["optim.lr=abc"],
    ["trainer.max_epoch=3"],
    ["trainer.max_epochs=0"],
    ["trainer.precision=bad"],
    ["trainer.callbacks=[]"],
    ["+trainer.callbacks=[]"],
    ["trainer.devices=-3", "data.batch_size=0", "optim.betas=[1,2,3]", "trainer.gradient_clip_val=-1"],
    ["data.batch_size=0"],
    ["trainer.devices=9"],
    ["trainer.devices=[0,1,2]", "trainer.num_nodes=3"],
    ["data.order_seed=1"],
    ["+data.order_seed=1"],
    ["model.encoder.patch_sise=4"],
    ["model.encoder.num_heads=5"],
    ["model.size.dim=50"],
    ["model.encoder.dpeth=6", "optim.lrr=1e-3", "optim.lr=-1"],
    ["model.init_from=3"],
    ["data.image_size=2"],
    ["data=captions", "data.pat=x"],
    ["data=questions"],
    ["data=webdataset_classes"],
    ["data=shapes_words"],
    ["task=classification", "data=captions"],
    ["task=classification", "model=tiny"],
    ["task=text_classification", "data=texts"],
    ["task=tagging", "model=lm_tiny"],
    ["task=captionin"],
    ["experiment=fooo"],
    ["logger=tensorboard", "logger.tensorboard.nam=x", "callbacks.samples.every=no"],
    ["task=conversations", "data.seed=-1", "schedule.warmup=x"],
    ["task=span_answering", "task.label_smoothing=2", "tokenizer.vocab_size=x"],
    ["callbacks.samples=5"],
    ["task.fields.images=null"],
    ["model=[]"],
    ["data.num_workers=-1"],
    ["seed=x", "compile=3", "name=a/b"],
    ["optim._target_=os.system"],
    ["optim._target_=torch.optim.SGD"],
    ["model._target_=5"],
    ["trainer.max_steps=99999999999999999999999"],
]
SCRIPT = """
import json, sys
from vlm.training.run.fit import main

for overrides in json.loads(sys.argv[1]):
    print(main(overrides), [name for name in ("torch", "lightning") if name in sys.modules])
"""


def fault_of(overrides, check):
    with pytest.raises(UserError) as caught:
        compose(overrides, check)
    return str(caught.value)


def check_imported(config, *, resolved=True, imports=True):
    """The check with the imported classes only."""
    checks._check(config, signature, resolved=resolved)


@pytest.mark.parametrize("overrides", FAULTS, ids=" ".join)
def test_faults_have_the_words_of_the_check_with_imported_classes(overrides, monkeypatch):
    early = fault_of(overrides, partial(checks.check, imports=False))
    monkeypatch.setattr(override, "arguments_of", partial(arguments_of, look_up=signature))
    monkeypatch.setattr(override, "injects", partial(injects, look_up=signature))
    assert early == fault_of(overrides, check_imported)


def test_mistakes_are_reported_without_torch_and_lightning():
    """What a newcomer mistypes; each of them took eight seconds when torch was imported first."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(FAULTS)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 []\n" * len(FAULTS)


def test_a_data_check_reports_a_misspelt_key_without_lightning():
    typed = ["check-data", "data.imagesize=3"]
    script = f"import sys\nfrom vlm.cli.main import run\nprint(run({typed!r}), 'lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n" and done.stderr == "error: data.imagesize: unknown; did you mean image_size?\n"


@cache
def composed(task):
    return compose([f"task={task}"]).tree


def misspelt(key, draw):
    parent, _, name = key.rpartition(".")
    at = draw.randrange(len(name))
    name = draw.choice([name[:at] + name[at + 1 :], name[:at] + draw.choice("abcxyz") + name[at:]])
    return f"{parent}.{name or 'x'}" if parent else name or "x"


VALUES = ["abc", "", None, True, -1, 0, 3, 0.3, 1.5, 10**6, float("nan"), [], [1, 2], ["a"], {}, {"a": 1}]


def faulty(task, seed):
    """The config of a task with one or two values changed or keys misspelt, drawn by a seed."""
    draw, tree = random.Random(seed), deepcopy(composed(task))
    keys = [key for key, value in walk(tree) if "." in key and not key.endswith(("_target_", "_partial_"))]
    for key in draw.sample(keys, draw.choice([1, 1, 2])):
        name = misspelt(key, draw) if draw.random() < 0.4 else key
        put_at = select(tree, name.rpartition(".")[0])
        if isinstance(put_at, dict):
            put(tree, name, draw.choice(VALUES) if name == key else select(tree, key))
    return resolve(tree)


def lines_of(config, look_up):
    try:
        checks._check(config, look_up)
    except UserError as error:
        return str(error).split("\n")
    return []


# Left to the imported classes: types of torch and Lightning, and what methods of the task and of the encoder decide.
LEFT = ("expected Module", "Accelerator", "Strategy", "Profiler")
LEFT += ("task.reward: rewards", "accumulate_grad_batches:", "data.cache_features:")


def check_generated(task, seeds):
    refused = equal = 0
    for seed in seeds:
        try:
            config = faulty(task, seed)
        except UserError:  # an interpolation of the changed value
            continue
        imported, early = lines_of(config, signature), lines_of(config, read_signature)
        refused, equal = refused + bool(imported), equal + (early == imported)
        left = [line for line in imported if any(word in line for word in LEFT)]
        assert early == imported or (left and not {*early} - {*imported}), (seed, early, imported)
    return refused, equal


@pytest.mark.parametrize("task", ["captioning", "tagging", *(pytest.param(t, marks=pytest.mark.slow) for t in TASKS)])
def test_generated_faults_are_found_in_the_same_words(task):
    refused, equal = check_generated(task, range(40))
    assert refused > 15 and equal > 35 * 0.8


@pytest.mark.nightly
@pytest.mark.parametrize("task", TASKS)
def test_many_generated_faults_are_found_in_the_same_words(task):
    check_generated(task, range(1000, 1600))
