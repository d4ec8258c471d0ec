"""A place for a folder of Hugging Face."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "theirs")
