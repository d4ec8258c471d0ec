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
from vlm.training.run.fit import main

TASKS = sorted(path.stem for path in (Path(__file__).parents[3] / "conf" / "task").glob("*.yaml"))
# By overrides, the start of each line of the answer.
FAULTS = {
    "modle.size.dim=32 model.decoder.num_haeds=2 lr=0.1 seed=1,2 model/encoder=vitt": [
        "seed=1,2: has several values",
        "model/encoder=vitt: unknown; choose from causal_text, one_text, ",
        "modle: unknown; did you mean model?",
        "model.decoder.num_haeds: unknown; did you mean num_heads?",
        "lr: unknown; did you mean optim.lr?",
    ],
    "captioning": ["captioning: cannot be read as KEY=VALUE; to choose this option, write task=captioning"],
    "task=captionin": ["task=captionin: unknown; choose from captioning, classification, "],
    "experiment=fooo": ["experiment=fooo: unknown; choose from books, "],
    "optim.lrr=1": ["optim.lrr: unknown; did you mean lr?"],
    "optim.lr=abc": ["optim.lr: 'abc' is str, expected float"],
    "name= optim.lr=inf": ["optim.lr: inf is not finite", "name: '', expected str (the name of a folder, without /)"],
    "optim.lr=nan optim.betas=[2,3] data.num_workers=1000000 data.max_len=1 model.size.dropout=1.5 "
    "trainer.max_epochs=0 trainer.limit_train_batches=-1 trainer.accumulate_grad_batches=0 "
    "trainer.val_check_interval=0 trainer.gradient_clip_val=-1": [
        "model.size.dropout: 1.5 is out of range, expected float (at least 0 and below 1)",
        "data.num_workers: 1000000 is out of range, expected int (at least 0 and at most 1024) | 'auto'",
        "optim.lr: nan is not finite, expected float (at least 0)",
        "optim.betas: [2, 3] is out of range, expected tuple[float (at least 0 and below 1), float (at least 0 and ",
        "trainer.max_epochs: 0 is out of range, expected int | None (at least 1, or -1)",
        "trainer.accumulate_grad_batches: 0 is out of range, expected int (at least 1)",
        "trainer.gradient_clip_val: -1 is out of range, expected float | None (at least 0)",
        "trainer.val_check_interval: 0 is out of range, expected int | float | str | None (above 0)",
        "trainer.limit_train_batches: -1 is out of range, expected int | float | None (above 0)",
        "data.max_len: 1 is out of range, expected int (at least 3)",
    ],
    "callbacks.checkpoints.every_n_steps=0 callbacks.bad_samples.limit=3 task.max_tokens=0 seed=-1 name=../../x": [
        "callbacks.checkpoints.every_n_steps: 0 is out of range, expected int (at least 1)",
        "callbacks.bad_samples.limit: 3 is out of range, expected float (at least 0 and at most 1)",
        "task.max_tokens: 0 is out of range, expected int (at least 1)",
        "seed: -1 is out of range, expected int (at least 0)",
        "name: '../../x', expected str (the name of a folder, without /)",
    ],
    "trainer.max_epoch=3": ["trainer.max_epoch: unknown; did you mean max_epochs?"],
    "trainer.max_steps=99999999999999999999999": ["trainer.max_steps: the number is too large"],
    "trainer.precision=bad": ["trainer.precision: 'bad' is unknown; choose from 64, 32, 16, "],
    "trainer.callbacks=[]": ["trainer.callbacks: is set by the program; remove it"],
    "+trainer.callbacks=[]": ["trainer.callbacks: is set by the program; remove it"],
    "+logger.csv.folder=/tmp": ["logger.csv.folder: is set by the program; remove it"],
    "trainer.devices=-3 data.batch_size=0 optim.betas=[1,2,3] optim.lr=-1": [
        "data.batch_size: 0 is out of range, expected int (at least 1)",
        "optim.lr: -1 is out of range, expected float (at least 0)",
        "optim.betas: [1, 2, 3] is list, expected tuple[float, float]",
        "trainer.devices: -3 is out of range, expected list[int] | str | int (at least 1, or -1)",
    ],
    "trainer.devices=9": ["data.batch_size: 32 is not divisible by 9 devices; set a multiple"],
    "trainer.devices=[0,1,2] +trainer.num_nodes=3": ["data.batch_size: 32 is not divisible by 9 devices"],
    "data.order_seed=1": ["data.order_seed: unknown"],
    "+data.order_seed=1": ["data.order_seed: is set by the program; remove it"],
    "model.encoder.patch_sise=4": ["model.encoder.patch_sise: unknown; did you mean patch_size?"],
    "model.encoder.num_heads=5": ["model.encoder.num_heads: 5 does not divide dim, 96; change one of them"],
    "model.size.dim=50": ["model.size.num_heads: 3 does not divide dim, 50; change one of them"],
    "model.position.dim=3": ["model.position.dim: 3 differs from dim, 96; change one of them"],
    "model/position=rotary model.decoder.num_heads=8": [
        "model.position.head_dim: 32 differs from head_dim, 12; set model.size.num_heads instead, which both use"
    ],
    "model/position=rotary model.decoder.head_dim=16": [
        "model.position.head_dim: 32 differs from head_dim, 16; change one of them"
    ],
    "model/position=relative model.decoder.num_heads=8": [
        "model.size.num_heads: 3 differs from num_heads, 8; set model.size.num_heads instead, which both use"
    ],
    "data=drawn_lines data.image_size=[32,100]": ["model.encoder.patch_size: 8 does not divide image_size, [32, 100]"],
    "task=classification data=mnist": ["model.encoder.patch_size: 16 does not divide image_size, 28"],
    "data.image_size=[32,64,3]": ["data.image_size: [32, 64, 3] is list, expected int | tuple[int, int]"],
    "data.image_size=2": [
        "model.encoder.patch_size: 8 does not divide image_size, 2; change one of them",
        "data.image_size: 2 is smaller than model.encoder.patch_size, 8; change one of them",
    ],
    "+data.preprocess.tiles=true": ["data.augment: is not supported for images that are cut into squares; set it to "],
    "model.init_from=3": ["model.init_from: 3 is int, expected str | None"],
    "model.size.dim=${data.width}": ["model.size.dim: Interpolation key 'data.width' not found"],
    "data=captions data.pat=x": ["data.pat: unknown; did you mean path?"],
    "data=captions": ["data.root: missing, and so is data.path; give a folder or a table of images"],
    "data=questions": ["data.path: has no value; give data.path=VALUE"],
    "data=webdataset_classes": ["model.decoder.max_len: Interpolation key 'data.max_len' not found"],
    "task=masked_language_modeling data=joined_texts data.path=x": [
        "data.path: not a key of this data set; it has data.source.sources"
    ],
    "data=shapes_words": ["data: records of SceneWords hold text and words and tags, while task=captioning reads "],
    "task=classification data=captions": ["data: records of Captions hold image and captions, while task=classificat"],
    "task=language_modeling data=shapes": ["data: records of Shapes hold image and captions, while task=language_mod"],
    "model=classifier_tiny": ["model: Classifier does not fit task=captioning, which needs a VisionLanguageModel; "],
    "task=classification model=tiny": ["model: VisionLanguageModel does not fit task=classification, which needs a Cl"],
    "task=language_modeling model=tiny": ["model: VisionLanguageModel does not fit task=language_modeling, which nee"],
    "task=tagging model=lm_tiny": ["model: Decoder does not fit task=tagging, which needs a TokenClassifier; choose "],
    "task=text_classification data=texts": ["data.path: has no value; give data.path=VALUE"],
    "logger=tensorboard logger.tensorboard.nam=x callbacks.samples.every=no callbacks.checkpoints.mode=most": [
        "logger.tensorboard.nam: unknown; did you mean name?",
        "callbacks.samples.every: unknown",
        "callbacks.checkpoints.mode: 'most' is unknown; choose from min, max",
    ],
    "task=conversations data.seed=-1 schedule.warmup=x": [
        "data.seed: -1 is out of range, expected int (at least 0) | None",
        "schedule.warmup: 'x' is str, expected float",
    ],
    "task=span_answering task.label_smoothing=2 tokenizer.vocab_size=x": [
        "task.label_smoothing: unknown",
        "tokenizer.vocab_size: 'x' is str, expected int",
    ],
    "task=classification task.mixpu=0.1 task.mixup=-1 model.pool=max": [
        "task.mixpu: unknown; did you mean mixup?",
        "model.pool: 'max' is unknown; choose from mean, class, ",
        "task.mixup: -1 is out of range, expected float (at least 0)",
    ],
    "model/adapt=lora model.adapt.rank=0 model.adapt.projectons=[q] task.reward_samples=1 task.doubly_stochastic=-1": [
        "model.adapt.projectons: unknown; did you mean projections?",
        "task.reward_samples: 1 is out of range, expected int (at least 2)",
        "task.doubly_stochastic: -1 is out of range, expected float (at least 0)",
        "model.adapt.rank: 0 is out of range, expected int (at least 1)",
    ],
    "callbacks.samples=5": ["callbacks.samples: 5 has no class to build; give it a _target_"],
    "task.fields.images=null": ["task.fields.images: None has no class to build; give it a _target_"],
    "model=[] schedule=[]": [
        "model: is required; leave out model=[]",
        "schedule: is required; leave out schedule=[]",
    ],
    "trainer=[]": ["trainer: is required; leave out trainer=[]"],  # the task still sets keys of it
    "seed=x compile=3": ["seed: 'x' is str, expected int", "compile: 3 is int, expected bool | None"],
    "optim._target_=os.system": ["optim._target_: os.system may not be built; only vlm.*, lightning.*, torch.opt"],
    "optim._target_=torch.optim.SGD": ["optim.betas: unknown", "optim.bfloat16: unknown"],
    "model._target_=5": ["model._target_: 5 may not be built; only vlm.*, lightning.*, torch.optim.* may"],
}
# Faults that only importing and building the parts finds: the overrides, and words of the answer.
LATE = {
    "task._target_=vlm.tasks.captioning.train.Captoning": "did you mean vlm.tasks.captioning.train.Captioning?",
    "tokenizer.vocab_size=7": "tokenizer.vocab_size: 7",
    "tokenizer.model_type=words": "tokenizer.model_type",
    "+data.preprocess.resize=fit": "crop, crop_down, squash, pad",
    "data=captions data.root=absent": "data.root=absent: no such folder",
    "task=classification data=image_tar data.path=absent.tar": "data.path=absent.tar: no such file",
    "task=classification data.repeats=3 data.batch_size=32": "data.repeats=3: does not divide",
    "task=classification model.pool=class": "class_token=true",
    "task=classification data.augment.policy=strong": "policy='strong'",
    "task=language_modeling data=text data.path=absent.txt": "data.path=absent.txt: no such file",
    "task=language_modeling data.stride=100000": "data.stride",
}
SCRIPT = """
import json, sys
from vlm.training.run.fit import main

for overrides in json.loads(sys.argv[1]):
    print(main(overrides.split()), [name for name in ("torch", "lightning") if name in sys.modules])
"""


def fault_of(overrides, check):
    with pytest.raises(UserError) as caught:
        compose(overrides, check)
    return str(caught.value)


def check_imported(config, *, resolved=True, imports=True):
    """The check with the imported classes only."""
    checks._check(config, signature, resolved=resolved)
    if resolved and imports:
        checks._raise_faults(checks.source_faults(config, signature))


@pytest.mark.sample(slow=20)
@pytest.mark.parametrize(("overrides", "lines"), FAULTS.items())
def test_faults_are_named_at_once_and_as_by_the_check_with_imported_classes(overrides, lines, monkeypatch):
    early = fault_of(overrides.split(), partial(checks.check, imports=False))
    assert [found[: len(line)] for found, line in zip(early.split("\n"), lines, strict=True)] == lines
    monkeypatch.setattr(override, "arguments_of", partial(arguments_of, look_up=signature))
    monkeypatch.setattr(override, "injects", partial(injects, look_up=signature))
    assert early == fault_of(overrides.split(), check_imported)


@pytest.mark.slow
def test_faults_are_reported_without_torch_and_lightning_and_nothing_is_created(tmp_path):
    """What a newcomer mistypes; each of them took eight seconds when torch was imported first."""
    mistakes = [*[*FAULTS][::12], "--epochs 5", "resume=absent", "resume=last"]
    program = [sys.executable, "-c", SCRIPT, json.dumps(mistakes)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "2 []\n" * len(mistakes)
    assert done.stderr.count("error: ") == len(mistakes) and "Traceback" not in done.stderr
    options, absent, last = done.stderr.rpartition("--epochs")[2].splitlines()
    assert "use the form KEY=VALUE" in options and "resume=absent: no such run" in absent and "there is no run" in last
    assert not list(tmp_path.iterdir())


@pytest.mark.sample(slow=10)
@pytest.mark.parametrize(("overrides", "words"), LATE.items())
def test_faults_of_data_and_models_are_a_line_and_nothing_is_created(overrides, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["trainer=cpu", *overrides.split()]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and words in said.err
    assert len(said.err.splitlines()) <= 3 and "Traceback" not in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_data_check_reports_a_misspelt_key_without_lightning():
    typed = ["check-data", "data.imagesize=3"]
    script = f"import sys\nfrom vlm.cli.main import run\nprint(run({typed!r}), 'lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n" and done.stderr == "error: data.imagesize: unknown; did you mean image_size?\n"


@cache
def compose_task(task):
    return compose([f"task={task}"]).tree


def misspelt(key, draw):
    parent, _, name = key.rpartition(".")
    at = draw.randrange(len(name))
    name = draw.choice([name[:at] + name[at + 1 :], name[:at] + draw.choice("abcxyz") + name[at:]])
    return f"{parent}.{name or 'x'}" if parent else name or "x"


VALUES = ["abc", "", None, True, -1, 0, 3, 0.3, 1.5, 10**6, float("nan"), [], [1, 2], ["a"], {}, {"a": 1}]


def faulty(task, seed):
    """The config of a task with one or two values changed or keys misspelt, drawn by a seed."""
    draw, tree = random.Random(seed), deepcopy(compose_task(task))
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
LEFT += ("task.reward:", "accumulate_grad_batches:", "data.cache_features:")


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


@pytest.mark.sample(plain=1, slow=4)
@pytest.mark.parametrize("task", ["captioning", "tagging", *TASKS])
def test_generated_faults_are_found_in_the_same_words(task):
    refused, equal = check_generated(task, range(40))
    assert refused > 15 and equal > 35 * 0.8


@pytest.mark.nightly
@pytest.mark.parametrize("task", TASKS)
def test_many_generated_faults_are_found_in_the_same_words(task):
    check_generated(task, range(1000, 1600))
