"""The one process that all trainings here are forked from."""

from collections.abc import Iterator

import pytest
from fork_server import ForkServer


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()
