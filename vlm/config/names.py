"""Short names of classes in checkpoints, which stay valid if a module is moved.

Checkpoints store classes of vlm by name only, such as ``ViT``. The module is found by searching the source files.
Classes of other packages keep their dotted name.
"""

import re
from functools import cache
from pathlib import Path

from vlm.errors import UserError

FORMAT = 2
# Packages whose classes a file may name (PACKAGES), and those whose classes may be built as models (MODELS).
PACKAGES = ("models", "nn", "data", "checkpoint", "tasks", "training")
MODELS = ("models", "nn")
_PRIVATE = ("data.store",)  # storage classes, which only sources build
_CLASS = re.compile(r"^class ([A-Z]\w*)(?:\[[^]]*\])?(?:\(([^)]*)\))?:", re.MULTILINE)


@cache
def modules() -> dict[str, list[str]]:
    """Returns the modules that define each class that a checkpoint may name, normally one per class."""
    root = Path(__file__).parents[1]
    by_name: dict[str, list[str]] = {}
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        if module.startswith(_PRIVATE):
            continue
        for name, bases in _CLASS.findall(path.read_text(encoding="utf-8")):
            if not {"Protocol", "NamedTuple", "Enum", "TypedDict"} & set(re.findall(r"\w+", bases)):
                by_name.setdefault(name, []).append(f"vlm.{module}")
    return by_name


def short(target: str) -> str:
    """Returns the name of a target in a checkpoint: the class name for classes of vlm, else the dotted name.

    Raises:
        UserError: It is in vlm, but not a class that a file may name.
    """
    if not target.startswith("vlm."):
        return target
    name = target.rpartition(".")[2]
    if len(modules().get(name, [])) != 1:
        raise UserError(f"{target}: cannot be stored in a checkpoint; use a class name that is unique in vlm")
    return name


def full(name: str) -> str:
    """Returns the dotted name for a name in a checkpoint.

    Raises:
        UserError: There is no class of this name, or it is a dotted name in vlm.
    """
    candidates = modules().get(str(name), [])
    if len(candidates) == 1:
        return f"{candidates[0]}.{name}"
    if "." not in str(name) or str(name).startswith("vlm."):
        raise UserError(
            f"the checkpoint names {name!r}, which this version of vlm does not have; install the vlm that wrote it"
        )
    return str(name)
