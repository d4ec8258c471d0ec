"""Public data sets, which some tests read where they are present."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("VLM_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def needs_shared(name: str) -> pytest.MarkDecorator:
    """Skips a test if this file or folder is absent."""
    return pytest.mark.skipif(not (SHARED / name).exists(), reason=f"{SHARED / name} is absent (set VLM_SHARED_DATA)")
