"""Training on rewards: advantages, gradients by hand and by counting, beside TRL's, and whole runs."""

import csv
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reward_steps as steps
import torch
import torch.nn.functional as F
from journey import interrupt_at, only_run, same_weights
from preference_steps import save_models
from small import command
from tiny_checkpoints import FILES
from torch import Tensor

from vlm.checkpoint import load as ckpt
from vlm.cli.main import run as vlm
from vlm.config import target
from vlm.config.compose import compose
from vlm.data.batch import TextRows, next_token_rows
from vlm.data.text.tokenizer import ByteTokenizer, tokenizer_from_state
from vlm.decoding.loop import decode_batch
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.nn.vocabulary_loss import Head
from vlm.tasks.shared.policy_gradient import BASELINES, PolicyGradient, divergence, policy_loss, sampled_losses
from vlm.tasks.shared.rollouts import Prompts, number_texts
from vlm.training.config.check import check
from vlm.training.run.build import build_data, build_model, build_task
from vlm.training.run.fit import main
from vlm.training.step.fsdp import ShardedStrategy
from vlm.training.step.losses import Term

FIXTURE = json.loads((FILES / "trl_rewards.json").read_text())
SIZES = ["model.size.dim=16", "data.image_size=32", "model/encoder=vit", "model.encoder.patch_size=8"]
STARTED = [f"model.init_from={FILES / 'captioning.ckpt'}", *SIZES]
REWARDED = [*STARTED, "task.reward=cider", "task.reward_samples=3"]


@pytest.fixture(scope="module")
def captioner():
    loaded = ckpt.read(FILES / "captioning.ckpt")
    return ckpt.load_model(loaded).eval().double(), tokenizer_from_state(loaded["vlm"]["tokenizer"])


def rows_of(captions: list[list[list[int]]], tokenizer: Any) -> TextRows:
    return next_token_rows([[[tokenizer.bos_id, *tokens] for tokens in row] for row in captions], tokenizer.pad_id)


def numbers_of(rows: TextRows, count: int) -> Tensor:
    places = list(range(len(rows.tokens)))
    return number_texts(rows, Prompts([], [], [], places, []), count)


def test_advantages_by_hand() -> None:
    rewards, greedy = torch.tensor([[1.0, 2.0, 6.0], [4.0, 4.0, 4.0]]), torch.tensor([2.0, 5.0])
    found = {name: baseline.compute_advantages(rewards, greedy) for name, baseline in BASELINES.items()}
    torch.testing.assert_close(found["leave_one_out"], torch.tensor([[-3.0, -1.5, 4.5], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(found["greedy"], torch.tensor([[-1.0, 0.0, 4.0], [-1.0, -1.0, -1.0]]))
    deviation = math.sqrt((4 + 1 + 9) / 2) + 1e-4
    grouped = torch.tensor([[-2.0, -1.0, 3.0], [0.0, 0.0, 0.0]]) / deviation
    torch.testing.assert_close(found["group"], grouped)


def test_the_gradient_is_that_of_each_text_alone(captioner) -> None:
    model, tokenizer = captioner
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = Decoding(sampling=Sampling(), results=4, max_tokens=6)
    ends = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}
    with torch.no_grad():
        drawn = decode_batch(model.decoder, model.encode(images), options, **ends)
    texts = [[text.tokens for text in row] for row in drawn]
    rewards = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = BASELINES["leave_one_out"].compute_advantages(rewards, None)
    assert weights.sum(1).abs().max() < 1e-12
    rows = rows_of(texts, tokenizer)
    losses = sampled_losses(model(images, rows.tokens, rows.segments), rows, model.head_parts)
    assert len(losses) == rows.targets.count == sum(len(tokens) for row in texts for tokens in row)
    loss = policy_loss(losses, numbers_of(rows, 4), weights.flatten())
    mine = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    alone = torch.zeros((), dtype=torch.float64)
    for place, row in enumerate(texts):
        for number, tokens in enumerate(row):
            read = torch.tensor([[tokenizer.bos_id, *tokens[:-1]]])
            logprobs = model.head(model(images[place : place + 1], read)).log_softmax(-1)[0]
            alone = alone - weights[place, number] * logprobs.gather(1, torch.tensor(tokens)[:, None]).sum()
    theirs = torch.autograd.grad(alone, list(model.parameters()), allow_unused=True)
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # losses are taken in float32


def test_the_mean_gradient_is_that_of_the_expected_reward() -> None:
    letters: Any = SimpleNamespace(bos_id=1, eos_id=2, pad_id=0)
    hidden, head, value = torch.randn(8, requires_grad=True), Head(torch.randn(7, 8)), torch.rand(7)
    probs = head.logits(hidden).softmax(-1)
    (expected,) = torch.autograd.grad((probs * value).sum(), hidden)
    tokens = torch.multinomial(probs.detach(), 40_000, replacement=True)
    rows = rows_of([[[token] for token in tokens.tolist()]], letters)
    weights = BASELINES["leave_one_out"].compute_advantages(value[tokens][None], None)
    losses = sampled_losses(hidden.expand(1, 2 * len(tokens), -1), rows, head)
    loss = policy_loss(losses, numbers_of(rows, len(tokens)), weights.flatten())
    (found,) = torch.autograd.grad(loss / rows.targets.count, hidden)
    assert F.cosine_similarity(-found, expected, dim=0) > 0.995
    torch.testing.assert_close(-found, expected, rtol=0.1, atol=0.002)


def test_the_divergence_and_its_gradient_are_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, generator=generator).requires_grad_()
    model, reference = logits.log_softmax(-1), torch.randn(9, generator=generator).log_softmax(-1)
    exact = (model.exp() * (model - reference)).sum()
    tokens = torch.multinomial(model.detach().exp(), 200_000, replacement=True, generator=generator)
    found = divergence(model[tokens], reference[tokens])
    assert found.min() >= 0 and found.mean().item() == pytest.approx(exact.item(), rel=0.03)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found.mean(), exact)]
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.01)
    assert divergence(model, model).abs().max() == 0


@pytest.mark.sample(plain=2, slow=4)
@pytest.mark.parametrize("case", steps.CASES)
def test_advantages_losses_and_gradients_are_those_of_trl(tmp_path: Path, case: str) -> None:
    """The fixture is what benchmarks/references/trl_rewards.sh wrote with GRPOTrainer and RLOOTrainer of TRL 1.16.0."""
    start, reference = save_models(tmp_path, "images dpo")
    ours = steps.compute(steps.build_task(start, reference, case))
    for name, theirs in ((name, theirs) for name, theirs in FIXTURE.items() if name.startswith(f"{case} (")):
        assert ours["advantages"] == pytest.approx(theirs["advantages"], abs=2e-5)
        if "cispo" in name:  # the other losses have other values and the same gradients
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for tensor, (norm, *values) in theirs["gradients"].items():
            assert norm > 0, tensor
            assert ours["gradients"][tensor] == pytest.approx([norm, *values], abs=2e-5 * max(1, norm)), tensor


def test_label_smoothing_and_sharded_weights_are_refused() -> None:
    parts = {"text_field": "captions", "fields": {"captions": SimpleNamespace()}, "tokenizer": ByteTokenizer()}
    trainer = SimpleNamespace(strategy=ShardedStrategy())
    task: Any = SimpleNamespace(label_smoothing=0.0, trainer=trainer, **parts)
    critic = PolicyGradient(task, {"cider": 1.0}, 5, BASELINES["group"])
    with pytest.raises(UserError, match=r"task.reward: not supported with sharded weights; use trainer=ddp"):
        critic.prepare()
    task.label_smoothing = 0.1
    with pytest.raises(UserError, match=r"task.label_smoothing: cannot be combined with task.reward"):
        PolicyGradient(task, {"cider": 1.0}, 5, BASELINES["group"])


@pytest.mark.slow
def test_people_s_captions_have_a_weight_of_their_own() -> None:
    def loss_with(reward: str) -> Term:
        config = compose(command("captioning", f"task.reward={reward}", *STARTED, "model.size.dropout=0"))
        check(config)
        data = build_data(config)
        data.prepare()
        torch.manual_seed(0)
        task: Any = build_task(config, build_model(config, data.sizes)[0], data)
        task._trainer = SimpleNamespace(strategy=None, datamodule=data, global_step=0)
        task.log = lambda *args: None
        (term,) = task.loss(next(iter(data.train_dataloader()))).values()
        return term

    both, drawn, people = map(loss_with, ("{cider: 1, likelihood: 0.3}", "cider", "null"))
    torch.testing.assert_close(both.total, drawn.total + 0.3 * people.total)
    assert both.count == drawn.count + people.count > people.count > 0


QUESTIONS = [f"model.init_from={FILES / 'image_questions.ckpt'}", *SIZES, "tokenizer=bytes", "data.max_len=96"]
QUESTIONS += ["task.reward_samples=2"]
DETECTOR = [f"model.init_from={FILES / 'detection.ckpt'}", *SIZES, "data.max_len=40"]
RUNS = {
    "captioning": REWARDED,
    "image_questions": [*QUESTIONS, "task.reward=length", "task.reward_baseline=group", "task.reward_kl=0.1"],
    "detection": [*DETECTOR, "task.reward={iou: 1, likelihood: 0.1}", "task.reward_baseline=greedy"],
}


@pytest.mark.sample(slow=3)
@pytest.mark.parametrize("task", RUNS)
def test_a_run_with_a_reward_resumes_exactly(task: str, tmp_path, monkeypatch) -> None:
    options = command(task, *RUNS[task], "trainer.max_epochs=2", "test=false", "optim.lr=1e-3")
    assert main([*options, f"runs={tmp_path / 'whole'}"]) == 0
    whole = only_run(tmp_path / "whole")
    rows = list(csv.DictReader((whole / "metrics.csv").open()))
    losses = [float(row["train/loss"]) for row in rows if row["train/reward"]]
    assert len(losses) == 16 and len(set(losses)) > 8
    if task == "captioning":
        assert len({float(row["train/reward"]) for row in rows if row["train/reward"]}) > 8
        assert {"val/repeated", "val/bad_endings", "val/bad_endings@references"} <= rows[-1].keys()
    assert (task == "image_questions") == ("train/kl" in rows[-1])
    with monkeypatch.context() as patch:
        interrupt_at(5, signal.SIGTERM, patch)
        assert main([*options, f"runs={tmp_path / 'cut'}"]) == 143
    assert main([f"resume={only_run(tmp_path / 'cut')}"]) == 0
    assert same_weights(*(run / "checkpoints" / "last.ckpt" for run in (whole, only_run(tmp_path / "cut"))))


def read_rewards(runs: Path) -> list[float]:
    rows = csv.DictReader((only_run(runs) / "metrics.csv").open())
    return [float(row["train/reward"]) for row in rows if row["train/reward"]]


@pytest.mark.slow
def test_the_reward_of_a_word_rises_unless_the_model_is_kept_close(tmp_path, monkeypatch) -> None:
    """A function of the user counts the word "red"; a text has at most ten words."""
    (tmp_path / "toy_reward.py").write_text(
        "def count_red(texts, **others):\n    return [text.split().count('red') for text in texts]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(target, "_allowed", [*target.PACKAGES])
    common = command("captioning", "tokenizer=words", "model.size.dropout=0", "test=false", "task.max_tokens=10")
    assert main([*common, "optim.lr=1e-2", "trainer.max_epochs=3", f"runs={tmp_path / 'start'}"]) == 0
    common += [f"model.init_from={only_run(tmp_path / 'start')}", "trust=toy_reward", "optim.lr=3e-3"]
    common += ["task.reward=toy_reward.count_red", "task.reward_baseline=group", "trainer.max_epochs=3"]
    for name, options in {"free": [], "close": ["task.reward_kl=1"]}.items():
        assert main([*common, *options, f"runs={tmp_path / name}"]) == 0
    free, close = (np.array(read_rewards(tmp_path / name)).reshape(3, 8).mean(1) for name in ("free", "close"))
    assert free[0] < 3 and free[2] > free[0] + 4 and free[2] > free[1] > free[0]
    assert close[2] < 1.5
    assert main([f"resume={only_run(tmp_path / 'free')}", "trust=toy_reward"]) == 0  # it is done


@pytest.mark.slow
def test_check_data_and_training_try_a_user_s_function(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "bad_reward.py").write_text(
        "def score(texts, **others):\n    return [1 / ('blue' not in text) for text in texts]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(target, "_allowed", [*target.PACKAGES])
    options = command("captioning", *STARTED, "task.reward=bad_reward.score", "trust=bad_reward")
    reason = r"task.reward: bad_reward.score, row \S+, text '.*blue.*': raised ZeroDivisionError: .*; correct it"
    assert vlm(["check-data", *options]) == 1
    assert re.search(rf"STOPS +{reason}", capsys.readouterr().out)
    assert main([*options, f"runs={tmp_path / 'runs'}"]) == 2
    assert re.search(reason, capsys.readouterr().err)


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path) -> None:
    options = command("captioning", *REWARDED, "trainer.max_epochs=1", "test=false", "model.size.dropout=0")
    options += ["task.reward_baseline=group", "task.reward_kl=0.1", "trainer.precision=32-true"]
    assert main([*options, f"runs={tmp_path / 'one'}"]) == 0
    both = [*options, f"runs={tmp_path / 'two'}", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    run = [sys.executable, str(Path(__file__).parents[3] / "train.py"), *both]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    one, two = (list(csv.DictReader((only_run(tmp_path / n) / "metrics.csv").open())) for n in ("one", "two"))
    losses = [[float(row["train/loss"]) for row in rows if row["train/loss"]] for rows in (one, two)]
    assert len(losses[0]) == 8 and losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            ["task.reward=cider"],
            "needs a trained model, whose sampled texts are rewarded; set model.init_from=RUN",
        ),
        ([*STARTED, "task.reward=cider", "task.label_smoothing=0.1"], "task.label_smoothing: cannot be combined with"),
        ([*STARTED, "task.reward={spice: 1}"], "rouge_l, cider, cider_constant, exact_match, length, likelihood"),
        (
            [*STARTED, "task.reward=my_package.score"],
            "package that is not trusted; if you trust its author, add --trust",
        ),
        (["task.reward_kl=0.1"], "task.reward_kl: has no effect without task.reward"),
        (["task.reward_baseline=group"], "task.reward_baseline: has no effect without task.reward"),
        ([*REWARDED, "task.reference=last"], "task.reference: has no effect with task.reward_kl=0"),
        ([*STARTED, "task.reward=spice"], "task.reward: spice: unknown; use bleu1"),
    ],
)
def test_wrong_rewards_are_named(options, named, tmp_path, capsys) -> None:
    assert main(command("captioning", *options, f"runs={tmp_path}")) == 2
    assert named in capsys.readouterr().err
