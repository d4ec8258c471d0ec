"""Signatures read from source against those of the imported classes."""

import inspect
from typing import Any

import pytest

from vlm.config import source
from vlm.config.types import hints, show

MODULES = [
    "lightning",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "torch.optim",
    "torch.optim.lr_scheduler",
]


def classes(module):
    held = __import__(module, fromlist=["_"])
    for name, value in vars(held).items():
        if (
            inspect.isclass(value)
            and not name.startswith("_")
            and value.__module__.startswith(("lightning", "torch.optim"))
        ):
            yield name, value


@pytest.mark.parametrize("module", MODULES)
def test_reading_tells_what_importing_would(module):
    compared = 0
    for name, real in classes(module):
        found = source.find(f"{module}.{name}")
        try:
            read = source.signature(found)
        except source.Unreadable:
            continue  # such are imported
        true = inspect.signature(real).parameters
        assert list(read) == list(true), name
        empty = inspect.Parameter.empty
        for key, parameter in read.items():
            assert parameter.kind == true[key].kind
            assert (parameter.default is empty) == (true[key].default is empty)
            seen, truth = show(parameter.annotation), show(hints(real).get(key, Any))
            # Any may stand for what is not written in Python, or only there for type checkers; nothing else may differ.
            assert seen == truth or "Any" in (seen, truth) or "Any" in seen.split(" | ") or truth == "Any", (name, key)
        bases = {base.__name__ for base in real.__mro__}
        assert {base.__name__ for base in found.__mro__} - {"StandIn", "Unknown"} <= bases
        compared += 1
    assert compared >= 3


def test_what_matters_of_the_trainer_is_not_any():
    read = source.signature(source.find("lightning.Trainer"))
    assert show(read["max_epochs"].annotation) == "int | None"
    assert show(read["callbacks"].annotation) == "list[Callback] | Callback | None"
    assert "'bf16-mixed'" in show(read["precision"].annotation)


def test_most_signatures_can_be_read():
    found = [(source.find(f"{module}.{name}")) for module in MODULES for name, _ in classes(module)]

    def readable(one):
        try:
            return bool(source.signature(one)) or True
        except source.Unreadable:
            return False

    assert sum(map(readable, found)) > 0.95 * len(found)


def test_an_odd_module_is_read_or_given_up(tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import NamedTuple\n"
        "try:\n    from absent import Thing\nexcept ImportError:\n    Thing = None\n"
        "@dataclass\nclass Data:\n    a: int\n"
        "class Tuple(NamedTuple):\n    a: int\n"
        "class Meta(type): ...\n"
        "class Made(metaclass=Meta):\n    def __init__(self, a): ...\n"
        "class New:\n    def __new__(cls, a): ...\n"
        "class Plain:\n    def __init__(self, a, /, b: 'Nothing' = print(1), *c, d: list['Plain'] = (), **e): ...\n"
        "def function(a: int = 3, *, b) -> Plain: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("Data", "Tuple", "Made", "New"):
        with pytest.raises(source.Unreadable):
            source.signature(source.find(f"odd.{name}"))
    kinds = [parameter.kind.name for parameter in source.signature(source.find("odd.Plain")).values()]
    assert kinds == ["POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "KEYWORD_ONLY", "VAR_KEYWORD"]
    function = source.find("odd.function")
    assert source.signature(function)["a"].default == 3
    assert source.returned(function) is source.find("odd.Plain")
    with pytest.raises(source.Missing) as caught:
        source.find("odd.Plane")
    assert "Plain" in caught.value.names
