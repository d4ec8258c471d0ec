"""Signatures that are read from source files equal those of the imported classes."""

import inspect
import math
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import vlm.training.config.check  # noqa: F401 limits the arguments of Lightning's classes and torch's
from vlm.config.signatures import read_signature
from vlm.config.target import is_injected, modules_by_class, signature
from vlm.config.types import describe_mismatch, fits
from vlm.errors import UserError

CONF = Path(__file__).parents[2] / "conf"
SHIPPED = sorted({name for path in CONF.rglob("*.yaml") for name in re.findall(r"_target_: *(\S+)", path.read_text())})
OPTIMIZERS = "Adadelta Adagrad Adam AdamW Adamax ASGD LBFGS NAdam RAdam RMSprop Rprop SGD SparseAdam"
CALLBACKS = "DeviceStatsMonitor EarlyStopping LearningRateMonitor ModelCheckpoint ModelSummary Timer TQDMProgressBar"
OTHERS = [
    "vlm.training.data_module.Data",
    "lightning.pytorch.Trainer",
    "lightning.pytorch.strategies.DDPStrategy",
    *(f"torch.optim.{name}" for name in OPTIMIZERS.split()),
    *(f"lightning.pytorch.callbacks.{name}" for name in CALLBACKS.split()),
]
NOT_READ = ("vlm.nn.position.Positions",)  # its constructor is that of torch's Module
# Shipped arguments of other packages' classes, whose types are not read: these accept every value.
FOREIGN = {"accelerator", "strategy", "profiler", "encoder", "image_encoder", "backbone", "projector", "stem"}
NUMBERS = [0, 1, -1, 5, 2**70, 0.5, -0.5, 1.5, math.nan, math.inf]
WORDS = ["x", "auto", "", "relu", "rms", "bf16-mixed", "both", "max"]
VALUES = [None, True, *NUMBERS, *WORDS, [], [1], [1, 2], [0.5, 1.5], ["a"], [1, "a"], [[1]], {}, {"a": 1}, {"a": "b"}]


@cache
def signatures(name: str) -> tuple[Any, Any]:
    return read_signature(name), signature(name)


def check_equal(name: str) -> None:
    read, imported = signatures(name)
    assert read.kind.__name__ == imported.kind.__name__
    assert [*read.parameters] == [*imported.parameters] and read.takes_any == imported.takes_any
    for key, expected in imported.parameters.items():
        found, empty = read.parameters[key], inspect.Parameter.empty
        assert found.kind == expected.kind, key
        assert (found.default is empty, found.default is None) == (expected.default is empty, expected.default is None)
        assert is_injected(found) == is_injected(expected), key
        if found.annotation is not Any and not is_injected(found):
            for value in VALUES:
                fit = fits(value, expected.annotation)
                assert fits(value, found.annotation) == fit, (key, value)
                if not fit:
                    said = describe_mismatch(value, expected.annotation)
                    assert describe_mismatch(value, found.annotation) == said


@pytest.mark.sample(plain=30, slow=200)
@pytest.mark.parametrize("name", [name for name in [*OTHERS, *SHIPPED] if name not in NOT_READ])
def test_what_is_read_equals_what_is_imported_and_types_of_shipped_classes_are_read(name):
    check_equal(name)
    read, imported = signatures(name)
    unknown = {
        key
        for key, parameter in read.parameters.items()
        if parameter.annotation is Any is not imported.parameters[key].annotation
    }
    assert name in OTHERS or unknown <= FOREIGN


@pytest.mark.slow
def test_every_class_that_a_checkpoint_may_name_is_read_as_it_is_imported():
    names = [f"{places[0]}.{name}" for name, places in modules_by_class().items() if len(places) == 1]
    read = []
    for name in names:
        try:
            signature(name)
        except (UserError, ValueError):  # no target, or without a signature
            continue
        if read_signature(name) is not None:
            check_equal(name)
            read.append(name)
    assert len(read) > 200


def test_bases_are_read():
    """A Product fits an annotation as the imported classes do."""
    known = [pair for name in SHIPPED if name.startswith("vlm.") and None not in (pair := signatures(name))]
    for read, imported in known:
        for other, other_imported in known:
            assert issubclass(read.kind, other.kind) == issubclass(imported.kind, other_imported.kind)


@pytest.mark.parametrize(
    "name", ["strangers.parts.ViT", "vlm.data.fields.Nothing", "vlm.models.nowhere.Class", "lightning.No"]
)
def test_what_has_no_source_is_left_to_the_import(name, strangers):
    assert read_signature(name) is None


@pytest.mark.parametrize("name", ["os.system", "vlm.cli.main.run", "vlm.data._x.Y", 3, ["a"], None])
def test_names_that_may_not_be_built_are_refused_as_by_the_import(name):
    with pytest.raises(UserError) as expected:
        signature(name)
    with pytest.raises(UserError) as found:
        read_signature(name)
    assert str(found.value) == str(expected.value)


@pytest.mark.slow
def test_reading_imports_nothing():
    script = f"""
import sys
from vlm.config.signatures import read_signature
found = [read_signature(name) for name in {SHIPPED!r}]
print(sum(map(bool, found)), [name for name in ("torch", "lightning", "numpy", "vlm.nn") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=CONF.parent)
    assert done.stdout == f"{len(SHIPPED) - len(NOT_READ)} []\n"
