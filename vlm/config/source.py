"""Reads what a dotted name means, and its signature, from source files, importing nothing but the standard library.

Importing Lightning takes ten seconds and more; a misspelt key in a config should not. Classes become stand-ins with the
same bases, so that ``issubclass`` answers as it would for the real ones. What cannot be read with certainty raises
``Unreadable``, and the caller imports the module instead.
"""

import ast
import builtins
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_WITHOUT_FIELDS = {"ABC", "Generic", "Protocol", "object"}  # bases that add no constructor
_SOME_DEFAULT = object()  # one that is no literal


class Unreadable(Exception):
    """The source does not say plainly what was asked; importing it would."""


class Missing(Exception):
    """A name that is certainly not there.

    Args:
        module: The deepest module that was found on the way to the name.
        rest: What is left of the name.
        names: What could have stood in the place of the first part of the rest.
    """

    def __init__(self, module: str, rest: list[str], names: list[str]) -> None:
        super().__init__(f"{module} has no {rest[0]}")
        self.module, self.rest, self.names = module, rest, names


class StandIn:
    """Base of the classes that stand for real ones which are not imported."""

    _node: ast.ClassDef
    _protocol = False

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class Unknown(StandIn):
    """Stands for a base that could not be read."""


@dataclass(frozen=True)
class Function:
    """A function definition and the module it stands in."""

    module: str
    node: ast.FunctionDef


@dataclass(frozen=True)
class Module:
    """A module whose attributes are read when asked for, as an annotation's ``torch.Tensor`` does."""

    name: str

    def __getattr__(self, attribute: str) -> Any:
        return lookup(self.name, attribute)


def find(name: str) -> Any:
    """What a dotted name means: a stand-in for a class, a Function, or something of the standard library.

    Raises:
        Missing: There is certainly no such thing.
        Unreadable: The source does not say.
    """
    parts = name.split(".")
    depth = 1
    while depth < len(parts) and _file(".".join(parts[: depth + 1])) is not None:
        depth += 1
    module, rest = ".".join(parts[:depth]), parts[depth:]
    if not rest:
        return Module(module)
    try:
        found = lookup(module, rest[0])
    except Missing as error:
        raise Missing(module, rest, error.names) from None
    for part in rest[1:]:
        if inspect.ismodule(found):
            return found
        if not isinstance(found, Module):
            raise Unreadable(name)
        found = getattr(found, part)
    return found


def signature(found: type[StandIn] | Function) -> dict[str, inspect.Parameter]:
    """The parameters of a class's constructor or of a function, their annotations evaluated."""
    if isinstance(found, Function):
        return {p.name: p for p in _parameters(found.module, found.node)}
    for cls in found.__mro__[:-2]:  # without StandIn and object
        assert issubclass(cls, StandIn)
        if cls is Unknown or _makes_constructor(cls._node):
            raise Unreadable(f"{cls.__name__} does not write its constructor out")
        methods = [n for n in cls._node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if methods:
            return {p.name: p for p in list(_parameters(cls.__module__, methods[-1]))[1:]}
    return {}


def returned(function: Function) -> Any:
    """The annotation of what a function returns."""
    return _evaluate(function.module, function.node.returns) if function.node.returns else Any


@cache
def lookup(module: str, name: str) -> Any:
    """What a name at the top of a module means; as ``find``."""
    if module.partition(".")[0] in {*sys.stdlib_module_names, "typing_extensions"}:
        return getattr(import_module(module), name, Any)
    bindings, stars = _bindings(module)
    if name in bindings:
        return _meaning(module, name, bindings[name])
    if _file(f"{module}.{name}") is not None:
        return Module(f"{module}.{name}")
    for star in stars:
        if _absent(star):  # imported where a try allows for its absence
            continue
        try:
            return lookup(star, name)
        except Missing:
            continue
    if "__getattr__" in bindings:
        raise Unreadable(f"{module}.{name}")
    folder = _file(module)
    inside = folder.parent.iterdir() if folder is not None and folder.name == "__init__.py" else ()
    raise Missing(module, [name], [*bindings, *(path.stem for path in inside)])


def _meaning(module: str, name: str, node: Any) -> Any:
    if isinstance(node, ast.ClassDef):
        return _stand_in(module, node)
    if isinstance(node, ast.FunctionDef):
        return Function(module, node)
    if isinstance(node, ast.expr):
        return _evaluate(module, node)
    source, attribute = node
    if attribute is None:
        root = source.partition(".")[0]
        return import_module(source) if root in sys.stdlib_module_names else Module(source)
    if source == module and attribute == name:  # from . import part, where part is a module
        return Module(f"{module}.{name}")
    return lookup(source, attribute)


def _stand_in(module: str, node: ast.ClassDef) -> type[StandIn]:
    bases: list[type] = []
    protocol = False
    for expression in node.bases:
        base = _evaluate(module, expression)
        name = getattr(base, "__name__", None) or str(base)
        protocol |= name == "Protocol"
        if inspect.isclass(base) and issubclass(base, StandIn):
            bases.append(base)
        elif getattr(base, "__origin__", None) is None and name not in _WITHOUT_FIELDS:
            bases.append(Unknown)
    bases = list(dict.fromkeys(sorted(bases, key=lambda base: base is Unknown))) or [StandIn]
    # The ABCs of collections ask a class for these by name.
    own = {name for child in node.body for name, _ in _bound(child, module)}
    body: dict[str, Any] = {
        name: True for name in ("__call__", "__iter__", "__len__", "__contains__", "__getitem__") if name in own
    }
    try:
        return type(node.name, tuple(bases), {**body, "__module__": module, "_node": node, "_protocol": protocol})
    except TypeError:  # bases of which some are unknown may have no order
        return type(node.name, (Unknown,), {"__module__": module, "_node": node})


def _makes_constructor(node: ast.ClassDef) -> bool:
    """Whether something other than ``__init__`` may decide how the class is called."""
    decorated = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    metaclass = any(word.arg == "metaclass" and "ABCMeta" not in ast.unparse(word.value) for word in node.keywords)
    names = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    return decorated or metaclass or "__new__" in names


def _parameters(module: str, node: ast.FunctionDef) -> Iterator[inspect.Parameter]:
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(args.defaults)), *args.defaults]
    for index, (arg, default) in enumerate(zip(plain, defaults, strict=True)):
        positional = index < len(args.posonlyargs)
        kind = inspect.Parameter.POSITIONAL_ONLY if positional else inspect.Parameter.POSITIONAL_OR_KEYWORD
        yield _parameter(module, arg, kind, default)
    if args.vararg:
        yield _parameter(module, args.vararg, inspect.Parameter.VAR_POSITIONAL, None)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(module, arg, inspect.Parameter.KEYWORD_ONLY, default)
    if args.kwarg:
        yield _parameter(module, args.kwarg, inspect.Parameter.VAR_KEYWORD, None)


def _parameter(module: str, arg: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    value: Any = inspect.Parameter.empty
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            value = _SOME_DEFAULT
    annotation = _evaluate(module, arg.annotation) if arg.annotation else Any
    return inspect.Parameter(arg.arg, kind, default=value, annotation=annotation)


def _named(module: str, name: str) -> Any:
    """What a name in an annotation means; one that cannot be read says nothing."""
    try:
        return lookup(module, name)
    except Missing:
        return getattr(builtins, name, Any)
    except Unreadable:
        return Any


def _evaluate(module: str, expression: ast.expr) -> Any:
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        try:
            expression = ast.parse(expression.value, mode="eval").body
        except SyntaxError:
            return Any
    try:
        return _hint(module, expression)
    except Exception:  # whatever a stranger's annotation raises, it says nothing then
        return Any


def _hint(module: str, node: ast.expr) -> Any:
    """Only what annotations are made of: a call could do anything."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _named(module, name)
        case ast.Attribute(value=value, attr=name):
            return getattr(_hint(module, value), name)
        case ast.Subscript(value=value, slice=inside):
            return _hint(module, value)[_hint(module, inside)]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _hint(module, left) | _hint(module, right)
        case ast.Tuple(elts=parts):
            return tuple(_hint(module, part) for part in parts)
        case ast.List(elts=parts):
            return [_hint(module, part) for part in parts]
    raise Unreadable(ast.dump(node))


@cache
def _bindings(module: str) -> tuple[dict[str, Any], list[str]]:
    """What the top of a module binds each name to, and the modules that it imports with a star."""
    path = _file(module)
    if path is None:
        raise Unreadable(module)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise Unreadable(module) from error
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    bindings: dict[str, Any] = {}
    stars: list[str] = []
    for node, certain in _statements(tree.body):
        for name, meaning in _bound(node, package):
            if name == "*":
                stars.append(meaning[0])
            elif certain or name not in bindings:
                bindings[name] = meaning
    return bindings, stars


def _statements(body: list[ast.stmt], certain: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "handlers", "orelse", "finalbody"):
                for child in getattr(node, name, []):
                    yield from _statements(getattr(child, "body", [child]) if name == "handlers" else [child], False)
        else:
            yield node, certain


def _bound(node: ast.stmt, package: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name, node
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield (
                alias.asname or alias.name.partition(".")[0],
                (
                    alias.name if alias.asname else alias.name.partition(".")[0],
                    None,
                ),
            )
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            yield alias.asname or alias.name, (source, alias.name)


def _absent(module: str) -> bool:
    package, _, name = module.rpartition(".")
    init = _file(package) if package else None
    return init is not None and not any(init.parent.glob(f"{name}*"))


@cache
def _file(module: str) -> Path | None:
    root, *rest = module.split(".")
    try:
        spec = find_spec(root)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        origin = Path(spec.origin or "")
        return origin if origin.suffix == ".py" else None
    for place in spec.submodule_search_locations or []:
        path = Path(place, *rest)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None
