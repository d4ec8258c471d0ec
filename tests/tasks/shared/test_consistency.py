"""The loss of two passes (R-Drop) against two passes written out, and what it refuses."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small import TASKS, command

from vlm.config.compose import compose
from vlm.training.run.build import build_data, build_model, build_task
from vlm.training.run.fit import main

FIELDS = {"captioning": "captions", "translation": "translation"}


@pytest.mark.parametrize("name", FIELDS)
def test_the_loss_is_that_of_two_passes(tmp_path: Path, name: str) -> None:
    options = ["trainer=cpu", f"runs={tmp_path}", "task.consistency=2.5", "task.label_smoothing=0.1"]
    config = compose([f"task={name}", *TASKS[name], *options])
    data = build_data(config)
    data.prepare()
    model = build_model(config, data.sizes)[0]
    task = build_task(config, model, data)
    batch = next(iter(data.train_dataloader()))
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda _, __, hidden: seen.append(hidden))
    terms = task.loss(batch)
    assert list(terms) == ["tokens", "consistency"] and terms["consistency"].weight == 2.5
    targets, head = batch[FIELDS[name]].targets, model.head_parts
    assert task.counts(batch) == {term: terms[term].count for term in terms} == dict.fromkeys(terms, targets.count)
    one, other = (head.logits(targets.pick(hidden)).log_softmax(-1) for hidden in seen)
    assert not torch.equal(one, other)  # dropout differs
    losses = [F.cross_entropy(side, targets.labels, reduction="sum", label_smoothing=0.1) for side in (one, other)]
    torch.testing.assert_close(terms["tokens"].total, sum(losses) / 2)
    both = [F.kl_div(*sides, reduction="sum", log_target=True) for sides in ((one, other), (other, one))]
    torch.testing.assert_close(terms["consistency"].total, sum(both) / 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("captioning", ["model.size.dropout=0"], "has no effect without dropout; set model.size.dropout"),
        ("show_attend_tell", [], "cannot be combined with task.doubly_stochastic; leave one of them out"),
    ],
)
def test_what_has_no_effect_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, options: list[str], message: str
) -> None:
    assert main([*command(name), f"runs={tmp_path}", "task.consistency=1", *options]) == 2
    assert f"task.consistency: {message}" in " ".join(capsys.readouterr().err.split())
