"""Fixtures that tests of several folders share."""

import gc
import os
import signal
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tensors of tests are small: a second thread only waits

import pytest
import torch
from hypothesis import settings
from torch import nn

# By Python's own thresholds an eighth of the tests' time goes into looking through what the libraries made.
gc.set_threshold(50_000, 20, 100)
# How long an example takes says how busy the machine is, and nothing of what is tested.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
# A script starts what it runs in the background with Ctrl-C ignored, and the commands of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none, however it was selected."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def scramble() -> Callable[[nn.Module], nn.Module]:
    """Moves every parameter of a module at random, so that no zero or one of its initialisation hides a fault."""

    def randomise(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.4 * torch.randn_like(parameter))
        return module.eval()

    return randomise
