"""What a ``_target_`` may name, and what it names."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from vlm.config import source
from vlm.config.types import did_you_mean, hints, nearest
from vlm.errors import UserError

_allowed = ["vlm", "lightning", "torch.optim"]
_OURS = len(_allowed)
_CLASSES_ONLY = ("vlm", "lightning", "torch")  # their functions do things to files and processes
_ROOMS = ("vlm.training", "vlm.data", "vlm.models", "vlm.nn", "vlm.tasks")  # where the parts of a run are


@dataclass(frozen=True)
class Target:
    """What checking needs to know of a class or factory function.

    Args:
        home: The module that defines it.
        is_class: Whether it is a class.
        parameters: Name -> parameter of its call, annotations evaluated.
        product: What calling it gives: a class (or a stand-in for it), or the annotation of what a function returns.
    """

    home: str
    is_class: bool
    parameters: dict[str, inspect.Parameter]
    product: Any


def trust(*packages: str) -> None:
    """Lets ``_target_`` name what these packages define, for the rest of the process."""
    _allowed.extend(package for package in packages if package not in _allowed)


def trusted() -> tuple[str, ...]:
    """The packages of the user's own that are trusted."""
    return tuple(_allowed[_OURS:])


def find(name: Any) -> Target:
    """Looks a target up in the sources, or by importing it where they do not say enough.

    Raises:
        UserError: The name is not allowed, or there is no such thing; the message has no path in front.
    """
    _refuse_strangers(name)
    try:
        target = _read(name)
    except source.Missing as error:
        alike = nearest(error.rest[0], [known for known in error.names if not known.startswith("_")])
        near = did_you_mean(alike and ".".join([error.module, alike, *error.rest[1:]]))
        raise UserError(f"there is no {name}{near}") from error
    except (source.Unreadable, RecursionError):
        target = _imported(name)
    _refuse_unbuildable(name, target)
    return target


def load(name: str) -> Callable[..., Any]:
    """Imports a target.

    Raises:
        UserError: As ``find``, or what it needs cannot be imported.
    """
    _refuse_strangers(name)
    found = _import(name)
    _refuse_unbuildable(name, _described(found))
    return found


def _refuse_strangers(name: Any) -> None:
    if not isinstance(name, str) or not _inside(name, _allowed):
        raise UserError(f"{name} may not be built; only {_listed()} may")
    if not all(part.isidentifier() and not part.startswith("_") for part in name.split(".")):
        raise UserError(f"{name} is not the dotted name of something public")


def _refuse_unbuildable(name: str, target: Target) -> None:
    # A name may pass through a module's own imports (vlm.x.os.system): what counts is where the thing was defined.
    home = f"{target.home}."
    elsewhere = _inside(home, ["vlm"]) and not _inside(home, _ROOMS)
    if elsewhere or not _inside(home, _allowed) or (_inside(name, _CLASSES_ONLY) and not target.is_class):
        raise UserError(f"{name} may not be built; a target is a class of {_listed()}")


@cache
def _read(name: str) -> Target:
    found = source.find(name)
    if isinstance(found, source.Function):
        return Target(found.module, False, source.signature(found), source.returned(found))
    if inspect.isclass(found) and issubclass(found, source.StandIn):
        return Target(found.__module__, True, source.signature(found), found)
    return Target("", False, {}, Any)  # a module, or something of the standard library


def _imported(name: str) -> Target:
    return _described(_import(name))


def _described(found: Any) -> Target:
    is_class = inspect.isclass(found)
    if not is_class and not inspect.isroutine(found):
        return Target("", False, {}, Any)
    annotations = hints(found)
    parameters = {
        parameter.name: parameter.replace(annotation=annotations.get(parameter.name, Any))
        for parameter in inspect.signature(found).parameters.values()
    }
    product = found if is_class else annotations.get("return", Any)
    return Target(found.__module__ or "", is_class, parameters, product)


def _import(name: str) -> Any:
    parts = name.split(".")
    found: Any = import_module(parts[0])
    for index, part in enumerate(parts[1:], 1):
        if not hasattr(found, part):
            path = ".".join(parts[: index + 1])
            try:
                import_module(path)
            except ModuleNotFoundError as error:
                if error.name == path:
                    raise UserError(f"there is no {name}") from error
                raise UserError(f"{name} needs the package {error.name}; install it") from error
            except ImportError as error:
                raise UserError(f"{name} cannot be imported: {error}") from error
        found = getattr(found, part)
    return found


def _listed() -> str:
    return ", ".join(f"{package}.*" for package in _allowed)


def _inside(name: str, packages: Collection[str]) -> bool:
    return any(name.startswith(f"{package}.") for package in packages)
