"""Self-critical training: its gradient by hand and by counting, its draws, its rewards, and whole runs."""

import csv
import random
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from journey import interrupt_at, only_run, same_weights
from small import command
from tiny_checkpoints import FILES
from torch import Tensor

from vlm.checkpoint import load as ckpt
from vlm.config.compose import compose
from vlm.data.batch import Batch, TextRows, next_token_rows
from vlm.data.text.tokenizer import ByteTokenizer, tokenizer_from_state
from vlm.errors import UserError
from vlm.evaluation.metrics.coco import References
from vlm.evaluation.metrics.ngrams import DocumentFrequencies
from vlm.evaluation.metrics.tokens import WORDS
from vlm.nn.vocabulary_loss import Head
from vlm.tasks.captioning.self_critical import (
    CaptionFaults,
    CaptionReward,
    SelfCritical,
    compute_advantages,
    draw_captions,
    reward_loss,
)
from vlm.training.config.check import check
from vlm.training.run.fit import main
from vlm.training.run.run import build_data, build_model, build_task
from vlm.training.step.fsdp import Sharded
from vlm.training.step.losses import Term

CHECKPOINT = str(FILES / "captioning.ckpt")
STARTED = [f"model.init_from={CHECKPOINT}", "model.size.dim=16", "data.image_size=32"]
STARTED += ["model/encoder=vit", "model.encoder.patch_size=8"]
REWARDED = [*STARTED, "task.reward=cider", "task.reward_samples=3"]


@pytest.fixture(scope="module")
def captioner():
    loaded = ckpt.read(CHECKPOINT)
    return ckpt.load_model(loaded).eval().double(), tokenizer_from_state(loaded["vlm"]["tokenizer"])


@pytest.fixture(scope="module")
def images(captioner) -> Tensor:
    return torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def drawn(captioner, images: Tensor, ids: list[str], seed: int = 0) -> list[list[list[int]]]:
    model, tokenizer = captioner
    return draw_captions(model, images, tokenizer, ids=ids, count=4, max_tokens=6, seed=seed)


def rows_of(captions: list[list[list[int]]], tokenizer: Any) -> TextRows:
    return next_token_rows([[[tokenizer.bos_id, *tokens] for tokens in row] for row in captions], tokenizer.pad_id)


def test_draws_depend_on_seed_and_id_alone(captioner, images) -> None:
    together = drawn(captioner, images, ["a", "b", "c"])
    assert [drawn(captioner, images[at : at + 1], [id])[0] for at, id in enumerate("abc")] == together
    assert drawn(captioner, images, ["a", "b", "c"], seed=1) != together
    assert drawn(captioner, images[:1], ["z"]) != together[:1]


def test_the_gradient_is_that_of_each_caption_alone(captioner, images) -> None:
    model, tokenizer = captioner
    texts = drawn(captioner, images, ["a", "b", "c"])
    weights = compute_advantages(torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    assert weights.sum(1).abs().max() < 1e-12
    rows = rows_of(texts, tokenizer)
    loss, count = reward_loss(model(images, rows.tokens, rows.segments), rows, weights, model.head_parts)
    assert count == sum(len(tokens) for row in texts for tokens in row)
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
    weights = compute_advantages(value[tokens][None])
    loss, count = reward_loss(hidden.expand(1, 2 * len(tokens), -1), rows, weights, head)
    (found,) = torch.autograd.grad(loss / count, hidden)
    assert F.cosine_similarity(-found, expected, dim=0) > 0.995
    torch.testing.assert_close(-found, expected, rtol=0.1, atol=0.002)


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


@pytest.mark.slow
def test_a_run_with_a_reward_resumes_exactly(tmp_path, monkeypatch) -> None:
    options = command("captioning", *REWARDED, "trainer.max_epochs=2", "test=false", "optim.lr=1e-3")
    assert main([*options, f"runs={tmp_path / 'whole'}"]) == 0
    whole = only_run(tmp_path / "whole")
    rows = list(csv.DictReader((whole / "metrics.csv").open()))
    rewards = [float(row["train/reward"]) for row in rows if row["train/reward"]]
    assert len(rewards) == 16 and len(set(rewards)) > 8
    assert {"val/repeated", "val/bad_endings", "val/bad_endings@references"} <= rows[-1].keys()
    with monkeypatch.context() as patch:
        interrupt_at(5, signal.SIGTERM, patch)
        assert main([*options, f"runs={tmp_path / 'cut'}"]) == 143
    assert main([f"resume={only_run(tmp_path / 'cut')}"]) == 0
    assert same_weights(*(run / "checkpoints" / "last.ckpt" for run in (whole, only_run(tmp_path / "cut"))))


def test_weights_in_parts_are_refused() -> None:
    parts = {"label_smoothing": 0.0, "text_field": "captions", "fields": {"captions": SimpleNamespace()}}
    trainer = SimpleNamespace(strategy=Sharded())
    task: Any = SimpleNamespace(tokenizer=ByteTokenizer(), trainer=trainer, **parts)
    with pytest.raises(UserError, match=r"task.reward: not supported with sharded weights; use trainer=ddp"):
        SelfCritical(task, "cider", samples=5).loss(Batch([], {}, []))


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            ["task.reward=cider"],
            "needs a trained captioner, whose sampled captions are rewarded; set model.init_from=RUN",
        ),
        ([*STARTED, "task.reward=cider", "task.label_smoothing=0.1"], "task.label_smoothing: cannot be combined with"),
        ([*STARTED, "task.reward={spice: 1}"], "rouge_l, cider, cider_constant, likelihood"),
        ([*STARTED, "task.reward=spice"], "task.reward: spice: unknown; use bleu1"),
    ],
)
def test_wrong_rewards_are_named(options, named, tmp_path, capsys) -> None:
    assert main(command("captioning", *options, f"runs={tmp_path}")) == 2
    assert named in capsys.readouterr().err


def captions(rng: random.Random, count: int, words: str) -> list[str]:
    return [" ".join(rng.choices(words.split(), k=rng.randint(1, 9))) for _ in range(count)]


RNG = random.Random(0)
CORPUS = [captions(RNG, 5, "a red blue dog runs on the grass") for _ in range(60)]
DRAWN, KNOWN = [captions(RNG, 3, "a red green dog sleeps on the grass") for _ in range(4)], CORPUS[7:11]


def test_rewards_are_the_scores_beside_the_whole_corpus() -> None:
    found = CaptionReward({"cider": 1.0, "bleu4": 0.5}, CORPUS)(DRAWN, KNOWN)
    whole = DocumentFrequencies.from_references([[WORDS.cut(text) for text in texts] for texts in CORPUS])
    names = ["a", "b", "c", "d"]
    prepared = References(dict(zip(names, KNOWN, strict=True)), whole)
    for column in range(3):
        scores = prepared.score({name: texts[column] for name, texts in zip(names, DRAWN, strict=True)}).per_image
        asked = [scores[name]["cider"] + 0.5 * scores[name]["bleu4"] for name in names]
        np.testing.assert_allclose(found[:, column], asked, rtol=1e-12)


def test_a_reward_does_not_depend_on_the_batch() -> None:
    corpus = [["a dog runs on the grass", "the dog runs"]] * 20 + [["一只狗在草地上奔跑", "狗在跑"], ["一只猫", "猫"]]
    reward = CaptionReward({"cider": 1.0, "cider_constant": -0.5}, corpus)
    drawn, references = [["the dog runs", "a cat"], ["狗在跑", "一只狗 在草地上奔跑"]], [corpus[0], corpus[20]]
    together = reward(drawn, references)
    alone = [reward([one], [known])[0] for one, known in zip(drawn, references, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_what_any_image_would_earn_is_taken_away() -> None:
    plain = CaptionReward({"cider": 1.0}, CORPUS)
    beside_all = np.stack([plain(DRAWN, [texts] * 4) for texts in CORPUS]).mean(0)
    asked = plain(DRAWN, KNOWN) - 0.5 * beside_all
    reward = CaptionReward({"cider": 1.0, "cider_constant": -0.5}, CORPUS)
    np.testing.assert_allclose(reward(DRAWN, KNOWN), asked, rtol=1e-12)


def test_faults_are_repeated_pairs_and_ends_within_a_phrase() -> None:
    faults = CaptionFaults(["a dog on the grass", "the dog", "a cat of a man", *["the end"] * 2])
    assert faults.shares(["a dog on a", "a dog a dog", "the dog", "the the the"]) == {
        "repeated": 0.5,  # "a dog" and "the the"
        "bad_endings": 0.5,  # "a" and "the" end no caption
    }
    assert faults.shares([""]) == {"repeated": 0.0, "bad_endings": 1.0}
