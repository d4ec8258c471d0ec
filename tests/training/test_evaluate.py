"""An evaluation leaves a run as it was."""

import re
import shutil
from pathlib import Path

import pytest
from tiny_checkpoints import FILES

from vlm.cli.main import run as vlm


@pytest.mark.parametrize("cached", [False, True])
def test_an_evaluation_writes_into_a_cache_that_is_there_and_makes_none(cached, tmp_path: Path, capsys) -> None:
    """Of text, tokens are cached."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    shutil.copy(FILES / "language_modeling.ckpt", run / "checkpoints" / "best.ckpt")
    if cached:
        (run / "cache").mkdir()
    before = set(tmp_path.rglob("*"))
    assert vlm(["evaluate", "-c", str(run), "--device", "cpu"]) == 0
    made = {path.parent.name for path in set(tmp_path.rglob("*")) - before}
    assert made == ({"cache"} if cached else set())
    assert re.search(r"^samples     \d+ used$", capsys.readouterr().out, re.MULTILINE)
