"""Fixtures of the tests of data sets."""

import pytest
from caption_data import picture


@pytest.fixture
def root(tmp_path):
    for name in "abc":
        picture(tmp_path / f"{name}.png")
    return tmp_path
