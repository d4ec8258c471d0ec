"""The loss of two passes (R-Drop) against two passes written out, and what it refuses."""

import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from journey import interrupt_at, only_run, same_weights
from small import TASKS, accumulation_options, command

from vlm.cli.main import run as vlm
from vlm.config.compose import compose
from vlm.data.batch import Batch
from vlm.training.run.build import build_data, build_model, build_task
from vlm.training.run.fit import main
from vlm.training.step.task import Task

FIELDS = {"captioning": "captions", "translation": "translation"}


def open_task(folder: Path, name: str) -> tuple[Task, Batch, list[torch.Tensor]]:
    """Returns a task trained with two passes, a batch, and a list to which each pass appends the model's output."""
    options = ["trainer=cpu", f"runs={folder}", "task.consistency=2.5", "task.label_smoothing=0.1"]
    config = compose([f"task={name}", *TASKS[name], *options])
    data = build_data(config)
    data.prepare()
    model = build_model(config, data.sizes)[0]
    outputs: list[torch.Tensor] = []
    model.register_forward_hook(lambda _, __, output: outputs.append(output))
    return build_task(config, model, data), next(iter(data.train_dataloader())), outputs


@pytest.mark.parametrize("name", FIELDS)
def test_the_loss_is_that_of_two_passes(tmp_path: Path, name: str) -> None:
    task, batch, seen = open_task(tmp_path, name)
    terms = task.loss(batch)
    assert list(terms) == ["tokens", "consistency"] and terms["consistency"].weight == 2.5
    targets, head = batch[FIELDS[name]].targets, task.model.head_parts
    assert task.counts(batch) == {term: terms[term].count for term in terms} == dict.fromkeys(terms, targets.count)
    one, other = (head.logits(targets.pick(hidden)).log_softmax(-1) for hidden in seen)
    assert not torch.equal(one, other)  # dropout differs
    losses = [F.cross_entropy(side, targets.labels, reduction="sum", label_smoothing=0.1) for side in (one, other)]
    torch.testing.assert_close(terms["tokens"].total, sum(losses) / 2)
    both = [F.kl_div(*sides, reduction="sum", log_target=True) for sides in ((one, other), (other, one))]
    torch.testing.assert_close(terms["consistency"].total, sum(both) / 2)


@pytest.mark.parametrize(("name", "term"), [("text_classification", "texts"), ("tagging", "words")])
def test_the_loss_of_classes_is_that_of_two_passes(tmp_path: Path, name: str, term: str) -> None:
    task, batch, seen = open_task(tmp_path, name)
    torch.nn.init.normal_(task.model.head.weight)  # which is zero in a new model
    if name == "tagging":
        batch["tags"].labels[1] = -100  # a word beyond max_len has no label
    terms = task.loss(batch)
    labels = batch["tags"].labels if name == "tagging" else batch["labels"]
    kept = labels != -100
    assert list(terms) == list(task.counts(batch) or {}) == [term, "consistency"]
    assert terms["consistency"].weight == 2.5
    one, other = (logits[kept].log_softmax(-1) for logits in seen)
    assert not torch.equal(one, other)
    losses = [F.cross_entropy(side, labels[kept], reduction="sum", label_smoothing=0.1) for side in (one, other)]
    torch.testing.assert_close(terms[term].total, sum(losses) / 2)
    both = [F.kl_div(*sides, reduction="sum", log_target=True) for sides in ((one, other), (other, one))]
    torch.testing.assert_close(terms["consistency"].total, sum(both) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["captioning", "tagging"])
def test_a_resumed_run_ends_as_one_without_interruption_and_is_evaluated(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = command(name, "task.consistency=2.5", "trainer.max_epochs=2", *accumulation_options(name))
    assert main([*options, f"runs={tmp_path / 'whole'}"]) == 0
    with monkeypatch.context() as patch:
        interrupt_at(3, signal.SIGTERM, patch)
        assert main([*options, f"runs={tmp_path / 'stopped'}"]) == 143
    run = only_run(tmp_path / "stopped")
    assert main([f"resume={run}"]) == 0
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert same_weights(checkpoint, only_run(tmp_path / "whole") / "checkpoints" / "last.ckpt")
    assert vlm(["evaluate", "-c", str(checkpoint), "--device", "cpu", "--out", str(tmp_path / "scores")]) == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("text_classification", ["task.teacher.path=x"], "cannot be combined with task.teacher; leave one of them out"),
        ("tagging", ["model.size.dropout=0"], "has no effect without dropout; set model.size.dropout"),
        ("captioning", ["model.size.dropout=0"], "has no effect without dropout; set model.size.dropout"),
        ("show_attend_tell", [], "cannot be combined with task.doubly_stochastic; leave one of them out"),
    ],
)
def test_what_has_no_effect_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, options: list[str], message: str
) -> None:
    assert main([*command(name), f"runs={tmp_path}", "task.consistency=1", *options]) == 2
    assert f"task.consistency: {message}" in " ".join(capsys.readouterr().err.split())
