"""Fixtures that tests of several folders share."""

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tensors of tests are small: a second thread only waits

import pytest
import torch
from hypothesis import settings
from torch import nn

# By Python's own thresholds an eighth of the tests' time goes into looking through what the libraries made.
gc.set_threshold(50_000, 20, 100)
# How long an example takes says how busy the machine is, and nothing of what is tested.
settings.register_profile("no deadline", deadline=None, max_examples=40)
settings.load_profile("no deadline")
# A script starts what it runs in the background with Ctrl-C ignored, and the commands of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of sampled tests, and skips what needs a GPU where there is none, however it was selected."""
    sampled = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            sampled[item.nodeid.partition("[")[0]].append(item)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for cases in sampled.values():
        mark_sample(cases, **cases[0].get_closest_marker("sample").kwargs)


def mark_sample(cases: list[pytest.Item], plain: int = 0, slow: int = 0) -> None:
    """Leaves so many cases of a test plain, marks so many slow and the others nightly.

    They are spread by the golden ratio, so that no value of a product of parameters is left out by its period.
    """
    for number in sorted(range(len(cases)), key=lambda number: number * (5**0.5 - 1) / 2 % 1):
        case = cases[number]
        is_nightly = case.get_closest_marker("nightly") is not None
        if plain and not is_nightly and not case.get_closest_marker("slow"):
            plain -= 1
        elif slow and not is_nightly:
            slow -= 1
            case.add_marker("slow")
        else:
            case.add_marker("nightly")


@pytest.fixture(autouse=True)
def seeded() -> None:
    # Without a GPU, torch.manual_seed notes the stack for each kind of device, which takes longer than most tests.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def scramble() -> Callable[[nn.Module], nn.Module]:
    """Moves every parameter of a module at random, so that no zero or one of its initialisation hides a fault."""

    def randomise(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.4 * torch.randn_like(parameter))
        return module.eval()

    return randomise
