"""Files of benchmarks/ as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TINY = ["model.size.dim=32", "model.size.num_heads=2", "model.size.encoder_depth=1", "model.size.decoder_depth=1"]
TINY += ["data.image_size=32", "data.num_workers=0"]


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file below benchmarks/, imported as the script that it is."""
    file = FOLDER / f"{name}.py"
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.syspath_prepend(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
