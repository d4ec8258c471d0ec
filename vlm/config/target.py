"""Classes that configs and checkpoints name: allowed packages, imports, signatures, and short names.

Checkpoints store classes of vlm by name only, such as ``ViT``, which stays valid if a module is moved. The module is
found by searching the source files. Classes of other packages keep their dotted name.
"""

import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NotRequired, Required, Unpack, get_args, get_origin, get_type_hints

from vlm.config.tree import Value
from vlm.config.types import hints
from vlm.errors import INJECTED, UserError, did_you_mean, find_similar

PACKAGES = ("vlm", "lightning", "torch.optim")
_allowed = [*PACKAGES]
_CLASSES_ONLY = ("vlm", "lightning", "torch")  # their functions may act on files and processes
# Packages of vlm with classes that a config may name.
_BUILDABLE_PACKAGES = (
    "vlm.training",
    "vlm.data",
    "vlm.models",
    "vlm.nn",
    "vlm.tasks",
    "vlm.checkpoint.pretrained_tokenizer",
)

_limits: dict[str, Mapping[str, Any]] = {}
# Folders whose classes a checkpoint may name, and those whose classes may be built as models.
_NAMED_PACKAGES = ("models", "nn", "data", "checkpoint", "tasks", "training")
MODEL_PACKAGES = ("models", "nn")
_RENAMED = {"Sharded": "ShardedStrategy"}  # classes that configs of an earlier release name
_PRIVATE = ("data.store",)  # storage classes, which only sources build
_CLASS = re.compile(r"^class ([A-Z]\w*)(?:\[[^]]*\])?(?:\(([^)]*)\))?:", re.MULTILINE)


def limit(limits: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets annotations for arguments of other packages' classes.

    Args:
        limits: Annotations by argument, by prefix of the class's dotted name.
    """
    _limits.update(limits)


def limits_of(target: str) -> Mapping[str, Any]:
    """Returns the annotations that `limit` set for the arguments of a class, by its dotted name."""
    return next((limits for package, limits in _limits.items() if target.startswith(package)), {})


def trust(*packages: str) -> None:
    """Allows ``_target_`` to name classes of these packages until the process ends."""
    _allowed.extend(package for package in packages if package not in _allowed)


def check_package(package: str, option: str = "trust=") -> None:
    """Checks that Python finds a package that the user trusts.

    Args:
        option: The option that names the package, for the message.
    Raises:
        UserError: Python does not find the package.
    """
    if not is_importable(package):
        remedy = "install it, or set PYTHONPATH to the folder that contains it: PYTHONPATH=FOLDER vlm ..."
        raise UserError(f"{option}{package}: no such package; {remedy}")


def is_importable(package: str) -> bool:
    """Returns True if Python finds a package, without importing it."""
    first = package.split(".")[0]
    return first in sys.modules or (first.isidentifier() and find_spec(first) is not None)


def suggest_trust(package: str) -> str:
    """Returns the remedy for a checkpoint with a class of a package that the user has not trusted."""
    path = "" if is_importable(package) else f", with PYTHONPATH set to the folder that contains {package}"
    return f"if you trust its author, add --trust {package} (to vlm train: trust={package}){path}"


def trusted_packages() -> tuple[str, ...]:
    """Returns the packages that the user trusts."""
    return tuple(_allowed[len(PACKAGES) :])


@dataclass(frozen=True)
class Signature:
    """The signature of a target.

    Args:
        kind: The class of the object that the target returns; Any if it is unknown.
        parameters: Parameters by name, with evaluated annotations.
    """

    kind: Any
    parameters: Mapping[str, inspect.Parameter]

    @cached_property
    def arguments(self) -> dict[str, inspect.Parameter]:
        """Parameters that can be passed by keyword."""
        keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {name: parameter for name, parameter in self.parameters.items() if parameter.kind in keyword}

    @property
    def takes_any(self) -> bool:
        """Whether there is a ``**kwargs`` parameter."""
        return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self.parameters.values())


SignatureLookup = Callable[[Value], Signature | None]  # None if the signature is unknown


def signature(name: Value) -> Signature:
    """Imports a target and returns its signature.

    Raises:
        UserError: As `find`.
    """
    target = find(name)
    kind = target if inspect.isclass(target) else hints(target).get("return", Any)
    return Signature(kind, parameters(target))


def check_name(name: Value) -> str:
    """Checks that a config may name a target; returns the name.

    Raises:
        UserError: It may not. The message does not start with a key.
    """
    if not isinstance(name, str) or not _is_inside(name, _allowed):
        raise UserError(f"{name} may not be built; only {_format_allowed()} may")
    if not all(part.isidentifier() and not part.startswith("_") for part in name.split(".")):
        raise UserError(f"{name} is not a public dotted name")
    if not _is_buildable(name):
        raise UserError(f"{name} may not be built; a target is a class of {_format_allowed()}")
    return name


def is_allowed(name: str) -> bool:
    """Returns True for a name inside an allowed package that configs may name."""
    return _is_inside(name, _allowed) and _is_buildable(name)


def find(name: Value) -> Callable[..., Any]:
    """Imports a target: a class, or a factory function of a user's own package.

    Raises:
        UserError: The name is not allowed or does not exist, or an import fails. The message does not start with a key.
    """
    name = check_name(name)
    target = _import(name)
    # A name may pass through a module's imports (vlm.x.os.system), so the module that defines the target is checked.
    home = f"{getattr(target, '__module__', '')}."
    callable_kind = inspect.isclass(target) or (inspect.isroutine(target) and not _is_inside(name, _CLASSES_ONLY))
    if not callable_kind or not is_allowed(home):
        raise UserError(f"{name} may not be built; a target is a class of {_format_allowed()}")
    return target


def find_function(name: str, arguments: Collection[str]) -> Callable[..., Any]:
    """Imports a function of a package that the user trusts.

    Args:
        arguments: Names of the arguments that it will be called with.
    Raises:
        UserError: Its package is not trusted, it cannot be imported, or it does not take these arguments. The message
            does not start with a key.
    """
    if not any(name.startswith(f"{package}.") for package in trusted_packages()):
        raise UserError(f"{name} is in a package that is not trusted; {suggest_trust(name.split('.')[0])}")
    function = find(name)
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except (TypeError, ValueError) as error:  # ValueError: a function of C without a signature
        needed, short = ", ".join(arguments), name.rpartition(".")[2]
        raise UserError(
            f"{name} cannot be called with {needed} ({error}); define it as def {short}({needed})"
        ) from error
    return function


@cache
def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a target with evaluated annotations; ``**options: Unpack[...]`` is expanded."""
    annotations = hints(target)
    home = f"{target.__module__}.{target.__qualname__}"
    annotations |= limits_of(home)
    listed: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        hint = annotations.get(name, Any)
        if get_origin(hint) is Unpack:
            listed |= _options(get_args(hint)[0])
        else:
            listed[name] = parameter.replace(annotation=hint)
    return listed


def _options(options: Any) -> dict[str, inspect.Parameter]:
    """Returns the keys of a TypedDict as parameters; optional ones have a default of ``...``."""
    listed = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        stated = get_origin(hint) if get_origin(hint) in (NotRequired, Required) else None
        # TypedDict ignores Required in annotations that are strings.
        required = stated is Required or (name in options.__required_keys__ and stated is None)
        listed[name] = inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if required else ...,
            annotation=get_args(hint)[0] if stated else hint,
        )
    return listed


def is_injected(parameter: inspect.Parameter) -> bool:
    """Returns True for a parameter that the program supplies, by its annotation."""
    return INJECTED in getattr(parameter.annotation, "__metadata__", ())


def _import(name: str) -> Any:
    value: Any = None
    parts = name.split(".")
    for index, part in enumerate(parts):
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        path = ".".join(parts[: index + 1])
        try:
            value = import_module(path)
        except ModuleNotFoundError as error:
            if not f"{path}.".startswith(f"{error.name}."):
                raise UserError(f"{name} needs the package {error.name}; install it") from error
            if moved := _find_moved_class(name):
                return _import(moved)
            inside = {info.name for info in pkgutil.iter_modules(getattr(value, "__path__", []))}
            public = {item for item in inside | set(dir(value)) if not item.startswith("_")}
            similar = find_similar(part, public)
            hint = did_you_mean(similar and ".".join([*parts[:index], similar, *parts[index + 1 :]]))
            raise UserError(f"there is no {name}{hint}") from error
        except Exception as error:  # a module with a bug may raise anything
            raise UserError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    return value


@cache  # one line per name
def _find_moved_class(name: str) -> str | None:
    """Returns the present dotted name of a class of vlm that had another module or name in an earlier release."""
    short_name = name.rpartition(".")[2]
    short_name = _RENAMED.get(short_name, short_name)
    homes = modules_by_class().get(short_name, []) if name.startswith("vlm.") else []
    if len(homes) != 1:
        return None
    moved = f"{homes[0]}.{short_name}"
    print(f"note: {name} has moved to {moved}; the old name works in this release only", file=sys.stderr)
    return moved


def _format_allowed() -> str:
    return ", ".join(f"{package}.*" for package in _allowed)


def _is_buildable(name: str) -> bool:
    return _is_inside(name, _BUILDABLE_PACKAGES) or not _is_inside(name, ["vlm"])


def _is_inside(name: str, packages: Collection[str]) -> bool:
    return any(name.startswith(f"{package}.") for package in packages)


@cache
def modules_by_class() -> dict[str, list[str]]:
    """Returns the modules that define each class that a checkpoint may name, normally one per class."""
    root = Path(__file__).parents[1]
    by_name: dict[str, list[str]] = {}
    for path in sorted(path for package in _NAMED_PACKAGES for path in (root / package).rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        if module.startswith(_PRIVATE):
            continue
        for name, bases in _CLASS.findall(path.read_text(encoding="utf-8")):
            if not {"Protocol", "NamedTuple", "Enum", "TypedDict"} & set(re.findall(r"\w+", bases)):
                by_name.setdefault(name, []).append(f"vlm.{module}")
    return by_name


def shorten_name(target: str) -> str:
    """Returns the name of a target in a checkpoint: the class name for classes of vlm, else the dotted name.

    Raises:
        UserError: It is in vlm, but not a class that a file may name.
    """
    if not target.startswith("vlm."):
        return target
    name = target.rpartition(".")[2]
    if len(modules_by_class().get(name, [])) != 1:
        raise UserError(f"{target}: cannot be stored in a checkpoint; use a class name that is unique in vlm")
    return name


def expand_name(name: str) -> str:
    """Returns the dotted name for a name in a checkpoint.

    Raises:
        UserError: There is no class of this name, or it is a dotted name in vlm.
    """
    candidates = modules_by_class().get(str(name), [])
    if len(candidates) == 1:
        return f"{candidates[0]}.{name}"
    if "." not in str(name) or str(name).startswith("vlm."):
        raise UserError(
            f"the checkpoint names {name!r}, which this version of vlm does not have; install the vlm that wrote it"
        )
    return str(name)
