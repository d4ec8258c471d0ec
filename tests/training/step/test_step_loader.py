"""Loss terms of different counts: accumulated batches are one large batch, resumed anywhere."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from two_terms import SIZE, WEIGHT, D, Data, run

from vlm.data.samples import SampleKey, TrainBatches
from vlm.training.step.losses import Term
from vlm.training.step.step import StepState


def train_losses(tmp_path: Path, batch_size: int, **options: Any) -> dict[str, Any]:
    out = tmp_path / f"{batch_size}.json"
    run("TwoTerms", batch_size, out, **options)
    return json.loads(out.read_text())


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == [pytest.approx(step, rel=1e-12) for step in other["losses"]]
    assert one["val"] == pytest.approx(other["val"], rel=1e-12)
    for name, weight in other["weights"].items():
        own, reference = (torch.tensor(values, dtype=torch.float64) for values in (one["weights"][name], weight))
        torch.testing.assert_close(own, reference, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two epochs of a batch of 16 and one of 7."""
    return train_losses(tmp_path_factory.mktemp("large"), 16)


def test_accumulated_batches_take_the_steps_of_a_large_one(large, tmp_path) -> None:
    small = train_losses(tmp_path, 4, accumulate=4)
    assert 0 in small["marked"] and len(small["losses"]) == 4
    check_same(small, large)


def test_losses_are_weighted_sums_of_means(large) -> None:
    for split, losses in [("train", large["losses"][0]), ("val", large["val"])]:
        first, second = losses[f"{split}/loss_first"], losses[f"{split}/loss_second"]
        assert losses[f"{split}/loss"] == pytest.approx(first + WEIGHT * second, rel=1e-12)


def test_a_limited_epoch_ends_in_the_middle_of_a_step(tmp_path) -> None:
    limited = train_losses(tmp_path, 4, accumulate=4, limit_train_batches=5)
    assert len(limited["losses"]) == 4
    for name, weight in by_hand([slice(0, 4), slice(4, 5)]).items():
        torch.testing.assert_close(torch.tensor(limited["weights"][name], dtype=weight.dtype), weight)


def by_hand(steps: list[slice]) -> dict[str, torch.Tensor]:
    """Weights after two epochs of these steps, each over some batches of 4 at once."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(D, D, dtype=torch.float64) for name in ("trunk", "first", "second")})
    data, order = Data(4), TrainBatches(size=SIZE, batch_size=4, seed=3, position=lambda: (0, 0))
    for epoch in range(2):
        for part in steps:
            batch = data.read(
                [SampleKey(epoch, int(index)) for index in np.concatenate(order.global_batches(epoch)[part])]
            )
            hidden = model["trunk"](batch.x).tanh()
            loss = (model["first"](hidden) - batch.y).square().sum(1).mean()
            away = (model["second"](hidden) - batch.y)[batch.marked].abs().sum(1)
            model.zero_grad()
            (loss + WEIGHT * away.mean()).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    return model.state_dict()


def test_a_run_goes_on_in_the_middle_of_an_epoch(large, tmp_path) -> None:
    train_losses(tmp_path, 4, accumulate=4, save=tmp_path / "first.ckpt")
    resumed = train_losses(tmp_path, 4, accumulate=4, resume=tmp_path / "first.ckpt")
    assert len(resumed["losses"]) == 3
    check_same({**resumed, "losses": large["losses"][:1] + resumed["losses"]}, large)


BATCH = SimpleNamespace(ids=["a"], bad=())


def single_step() -> StepState:
    """A step of one process and one batch."""
    trainer: Any = SimpleNamespace(accumulate_grad_batches=1, world_size=1)
    return StepState(trainer, nn.Linear(1, 1))


def test_terms_without_counts_are_refused() -> None:
    terms = {name: Term(torch.tensor(1.0), 1) for name in ("first", "second")}
    with pytest.raises(TypeError, match="returns none, but its loss has first, second"):
        single_step().add(BATCH, terms)


def test_a_single_term_has_a_weight() -> None:
    term = {"first": Term(torch.tensor(2.0), 4, 0.5)}
    assert single_step().add(BATCH, term) == 1.0
