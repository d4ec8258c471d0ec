"""The moving average against its recurrence in float64."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

from vlm.training.callbacks.checkpoints import EMA


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def walk(self):
        """A step of training, as far as an average sees it."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter))
        self.model[1].running_mean.add_(1)
        self.model[1].num_batches_tracked.add_(1)


@pytest.fixture
def module():
    return Module()


def copy_state(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def floats(module):
    return {name: t.double().clone() for name, t in module.state_dict().items() if t.is_floating_point()}


def train(ema, module, steps, *, start=0, accumulate=1):
    trainer = SimpleNamespace(global_step=start)
    ema.on_train_start(trainer, module)
    truth = floats(module) if start == 0 else {name: t.double() for name, t in ema.average.items()}
    for step in range(start + 1, start + steps + 1):
        for _ in range(accumulate - 1):
            ema.on_train_batch_end(trainer, module, None, None, 0)
        module.walk()
        trainer.global_step = step
        ema.on_train_batch_end(trainer, module, None, None, 0)
        decay = min(ema.decay, (1 + step) / (10 + step))
        truth = {name: decay * truth[name] + (1 - decay) * tensor for name, tensor in floats(module).items()}
    return truth


def close(average, truth):
    assert average.keys() == truth.keys()
    for name, tensor in truth.items():
        torch.testing.assert_close(average[name].double(), tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_average_follows_the_recurrence(module, accumulate):
    ema = EMA(decay=0.6)
    truth = train(ema, module, 30, accumulate=accumulate)
    close(ema.average, truth)
    assert (1 + 5) / (10 + 5) < 0.6 < (1 + 30) / (10 + 30)  # both branches of the decay were seen


def test_validation_sees_the_average_and_training_goes_on_from_the_raw_weights(module):
    """A checkpoint that is saved meanwhile holds both."""
    ema = EMA(decay=0.9)
    train(ema, module, 5)
    raw = copy_state(module.state_dict())
    ema.on_validation_start(None, module)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in ema.average.items())
    checkpoint = {"state_dict": module.state_dict()}
    ema.on_save_checkpoint(None, module, checkpoint)
    assert checkpoint["state_dict"].keys() == raw.keys()
    assert all(torch.equal(tensor, raw[name]) for name, tensor in checkpoint["state_dict"].items())
    close(checkpoint["ema"], {name: tensor.double() for name, tensor in ema.average.items()})
    ema.on_validation_end(None, module)
    assert all(torch.equal(tensor, raw[name]) for name, tensor in module.state_dict().items())
    assert any(not torch.equal(tensor, raw[name]) for name, tensor in ema.average.items())


def test_the_average_goes_on_after_a_resume(module):
    ema = EMA(decay=0.6)
    train(ema, module, 4)
    checkpoint = {"state_dict": module.state_dict()}
    ema.on_save_checkpoint(None, module, checkpoint)
    stored = copy_state(checkpoint["ema"])
    resumed = EMA(decay=0.6)
    resumed.on_load_checkpoint(None, module, {"ema": stored})
    truth = train(resumed, module, 20, start=4)
    close(resumed.average, truth)
    assert all(torch.equal(stored[name], checkpoint["ema"][name]) for name in stored)  # not changed in place


def test_no_average_before_training(module):
    ema, checkpoint = EMA(decay=0.9), {"state_dict": {}}
    before = copy_state(module.state_dict())
    ema.on_validation_start(None, module)
    ema.on_save_checkpoint(None, module, checkpoint)
    assert checkpoint == {"state_dict": {}}
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
