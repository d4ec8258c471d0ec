"""The one process that all trainings here are forked from."""

from collections.abc import Iterator

import pytest
from kills import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()
