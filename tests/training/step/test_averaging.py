"""The update of a step: gradients of a sum are averaged and clipped as torch does it by hand, in every optimiser."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vlm.data.batch import Batch
from vlm.training.step.losses import Term
from vlm.training.step.step import StepState


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("limit", "by_value"),
    [(None, False), (0.05, False), (1e6, False), (0.002, True)],
    ids=["unclipped", "clipped by norm", "limit above the norm", "clipped by value"],
)
def test_a_step_of_two_batches_is_that_of_their_mean_loss(fused: bool, limit: float | None, by_value: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    expected = deepcopy(model)
    inputs, labels = torch.randn(3, 9, 5), torch.randint(0, 3, (3, 9))
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1, fused=fused) for part in (model, expected)]
    trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=1, global_step=0, precision_plugin=None)
    step = StepState(trainer, model)  # type: ignore[arg-type]
    for x, y in zip(inputs, labels, strict=True):
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
        for part, targets in zip(x.split(6), y.split(6), strict=True):
            total = F.cross_entropy(model(part), targets, reduction="sum")
            step.add(Batch(["a"], {}, []), {"loss": Term(total, len(targets))}).backward()
        losses = step.average(optimizers[0])
        step.check_and_clip(optimizers[0], limit, by_value=by_value)
        optimizers[0].step()
        mean = F.cross_entropy(expected(x), y)
        mean.backward()
        if limit and by_value:
            nn.utils.clip_grad_value_(expected.parameters(), limit)
        elif limit:
            nn.utils.clip_grad_norm_(expected.parameters(), limit)
        optimizers[1].step()
        torch.testing.assert_close(losses["loss"], mean.detach())
        for weight, reference in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(weight, reference)
            torch.testing.assert_close(weight.grad, reference.grad)
