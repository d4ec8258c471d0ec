"""Signatures of classes, read from their source files with `ast`, so that nothing is imported.

Importing torch and Lightning takes seconds. A misspelt key or a value of a wrong type is found without them: a target
is followed through the imports of its package to its class, and its parameters are those of the class's ``__init__``.
Annotations are composed of builtins, ``typing``, `vlm.errors`, and the classes and aliases of vlm. One that contains
anything else is Any, which accepts every value; `vlm.config.target` then decides, with the imported class.

Only the parts of a file that matter are parsed, because parsing whole files would cost every start 0.2 s.
"""

import ast
import builtins
import datetime
import inspect
import pathlib
import re
import typing
from collections import abc
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union

from vlm import errors
from vlm.config.target import (
    PACKAGES,
    Signature,
    SignatureLookup,
    check_name,
    is_allowed,
    is_injected,
    limits_of,
    signature,
)
from vlm.errors import INJECTED, Injected, Limit, UserError

# Modules whose objects are used as they are.
_KNOWN = {
    "builtins": builtins,
    "typing": typing,
    "typing_extensions": typing,
    "collections.abc": abc,
    "datetime": datetime,
    "pathlib": pathlib,
    "vlm.errors": errors,
}
# Types that are matched by methods, which may come from a base class that is not read, such as torch's Module.
_STRUCTURAL = ("Callable", "Collection", "Container", "Generator", "Hashable", "Iterable", "Iterator", "Sized")

_DOCSTRING = re.compile(r'\A(?:\s*#.*\n|\s+)*[rR]?"""(?s:.*?)"""')
# The functions and classes of a module, with their decorators.
_BLOCK = re.compile(r"^(?:@.*\n(?:[ )].*\n|\n)*)*(async def|def|class) +(\w+)(?:.*\n?)(?:[ \t)].*\n?|\n|#.*\n)*", re.M)
# The methods of a class: the name; of the constructor, the parameters too.
_METHOD = re.compile(
    r"^    (?:async )?def (?:(__init__\((?s:.*?)\)(?: -> None)?):\n|(\w+)\()(?s:.*?)(?=^    [@\w\"]|\Z)", re.M
)


class Unreadable(Exception):
    """A name cannot be followed to its definition, or an expression is not understood."""


class Module(NamedTuple):
    """A module, by its dotted name."""

    name: str


class Import(NamedTuple):
    """A name that a module imports: an attribute of another module, or the module itself if `name` is empty."""

    module: str
    name: str = ""


class ClassText(NamedTuple):
    """The source text of a class."""

    name: str
    text: str


class Source(NamedTuple):
    """A source file: what its names are bound to; None if that is decided when it runs. Classes are not parsed yet."""

    name: str
    bound: Mapping[str, ClassText | ast.expr | Import | None]


class Definition(NamedTuple):
    """Where a class is defined.

    Args:
        complete: Whether all of its base classes were found.
        form: A Protocol or a TypedDict is no type of a value.
    """

    source: Source
    node: ast.ClassDef
    complete: bool
    form: Literal["class", "protocol", "dict"]


_definitions: dict[type, Definition] = {}


def read_signature(name: Any) -> Signature | None:
    """Returns the signature of a target from its source file; None if it cannot be read there.

    The signature's kind is an empty class with the name, the bases and the literal attributes of the target.

    Raises:
        UserError: The name is not allowed.
    """
    check_name(name)
    return _signature_of(name)


@cache
def _signature_of(name: str) -> Signature | None:
    module, _, attribute = name.rpartition(".")
    try:
        found = _meaning(_locate_member(module, attribute))
        if found not in _definitions or not is_allowed(f"{found.__module__}."):
            return None
        return Signature(found, _parameters(found, limits_of(f"{found.__module__}.{found.__qualname__}")))
    except (Unreadable, RecursionError):
        return None


def quick_signature(name: Any) -> Signature:
    """Returns the signature of a target, from its source file if it can be read there; else imports the target.

    Raises:
        UserError: As `vlm.config.target.find`.
    """
    return read_signature(name) or signature(name)


def arguments_of(node: Any, look_up: SignatureLookup = quick_signature) -> dict[str, inspect.Parameter]:
    """The arguments of a node's class; empty if it is not a node or cannot be built."""
    try:
        found = look_up(node["_target_"]) if isinstance(node, Mapping) and "_target_" in node else None
        return found.arguments if found else {}
    except UserError:
        return {}


def injects(node: Any, argument: str, look_up: SignatureLookup = quick_signature) -> bool:
    """Returns True if the program supplies an argument of this name to a node's class, or one below it."""
    if parameter := arguments_of(node, look_up).get(argument):
        return is_injected(parameter)
    return isinstance(node, Mapping) and any(injects(child, argument, look_up) for child in node.values())


@cache
def _file(module: str) -> Path | None:
    """Returns the source file of a module; None if it has none, or is not of a package that is read."""
    if not any(f"{module}.".startswith(f"{package}.") or package.startswith(f"{module}.") for package in PACKAGES):
        return None
    first, *rest = module.split(".")
    for folder in _folders(first):
        path = Path(folder).joinpath(*rest)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None


@cache
def _folders(package: str) -> Sequence[str]:
    spec = find_spec(package)
    return (spec and spec.submodule_search_locations) or ()


@cache
def _read(module: str) -> Source:
    file = _file(module)
    if file is None or not any(f"{module}.".startswith(f"{package}.") for package in PACKAGES):
        raise Unreadable(module)
    bound: dict[str, Any] = {}

    def cut(block: re.Match[str]) -> str:
        bound[block[2]] = ClassText(block[2], block[0]) if block[1] == "class" else None
        return ""

    try:
        text = _BLOCK.sub(cut, _DOCSTRING.sub("", file.read_text(encoding="utf-8")))
        statements = ast.parse(text).body
    except (OSError, SyntaxError, ValueError) as error:
        raise Unreadable(module) from error
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for statement in statements:
        bound |= _bound(statement, package)
    return Source(module, bound)


def _parse_class(text: str) -> ast.ClassDef:
    """Parses a class without the bodies of its methods, or as it is if they cannot be cut out."""
    bare = _METHOD.sub(lambda method: f"    def {method[1] or f'{method[2]}()'}: ...\n", text)
    for source in (bare, text):
        try:
            (node,) = ast.parse(source).body
        except (SyntaxError, ValueError):
            continue
        if isinstance(node, ast.ClassDef):
            return node
    raise Unreadable(text.partition("\n")[0])


def _bound(statement: ast.stmt, package: str) -> dict[str, Any]:
    """Returns the names that a statement of a module binds, and what to."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return {name: value}
        case ast.AnnAssign(target=ast.Name(id=name), value=value):
            return {name: value}
        case ast.Import(names=names):
            modules = {alias.asname: alias.name for alias in names if alias.asname}
            modules |= {(first := alias.name.partition(".")[0]): first for alias in names if not alias.asname}
            return {name: Import(module) for name, module in modules.items()}
        case ast.ImportFrom(names=names, level=level):
            parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            module = ".".join([*parents, *filter(None, [statement.module])])
            return {alias.asname or alias.name: Import(module, alias.name) for alias in names}
        case ast.Expr():
            return {}
    undecided: dict[str, Any] = {}
    for node in ast.walk(statement):  # a condition or a loop: what it binds is decided when it runs
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                undecided[name] = None
            case ast.alias(name=name, asname=asname):
                undecided[asname or name] = None
    return undecided


def _locate(source: Source, name: str) -> Any:
    """Follows a name to what it is bound to: a Module, a known object, or the source and the expression or class.

    Raises:
        Unreadable: It cannot be followed.
    """
    bound = source.bound.get(name)
    if name not in source.bound and hasattr(builtins, name):
        return getattr(builtins, name)
    if bound is None:
        raise Unreadable(name)
    if not isinstance(bound, Import):
        return source, bound
    return _locate_member(bound.module, bound.name) if bound.name else Module(bound.module)


def _locate_member(module: str, name: str) -> Any:
    if module in _KNOWN:
        if name in _STRUCTURAL or not hasattr(_KNOWN[module], name):
            raise Unreadable(name)
        return getattr(_KNOWN[module], name)
    if _file(f"{module}.{name}") is not None:
        return Module(f"{module}.{name}")
    return _locate(_read(module), name)


def _meaning(found: Any) -> Any:
    """The class of a found definition, the value of a found expression, or what was found if it is neither."""
    if not (isinstance(found, tuple) and isinstance(found[0], Source)):
        return found
    source, bound = found
    return _class(source.name, bound.name) if isinstance(bound, ClassText) else _annotation(bound, source)


def _resolve(node: ast.expr, source: Source) -> Any:
    """The object that a name or an attribute of a module stands for."""
    match node:
        case ast.Name(id=name):
            return _meaning(_locate(source, name))
        case ast.Attribute(value=owner, attr=name) if isinstance(module := _resolve(owner, source), Module):
            return _meaning(_locate_member(module.name, name))
    raise Unreadable(ast.unparse(node))


@cache
def _class(module: str, name: str) -> type:
    """Returns an empty class with the name, the bases and the literal attributes of a class in a source file."""
    source = _read(module)
    text = source.bound[name]
    assert isinstance(text, ClassText)
    node = _parse_class(text.text)
    bases, complete = [], True
    form: Literal["class", "protocol", "dict"] = "class"
    foreign = not module.startswith("vlm.")
    defined = foreign and any(isinstance(method, ast.FunctionDef) and method.name == "__init__" for method in node.body)
    for expression in [] if defined else node.bases:  # what another package's class derives from does not matter
        try:
            base = _resolve(expression.value if isinstance(expression, ast.Subscript) else expression, source)
        except Unreadable:
            base = None
        if base in _definitions:
            bases.append(base)
            form = "dict" if _definitions[base].form == "dict" else form
        elif base in (typing.Protocol, typing.TypedDict):
            form = "protocol" if base is typing.Protocol else "dict"
        elif base not in (object, typing.Generic):
            complete = False
    attributes = {key: value for statement in node.body for key, value in _attributes(statement)}
    try:
        made = type(name, tuple(bases), {**attributes, "__module__": module})
    except TypeError as error:  # an order of bases that does not exist
        raise Unreadable(name) from error
    _definitions[made] = Definition(source, node, complete and not (node.keywords and form == "class"), form)
    return made


def _attributes(statement: ast.stmt) -> Iterator[tuple[str, Any]]:
    """Yields the public attributes that a statement of a class sets; None if the value is no literal."""
    match statement:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
        ):
            try:
                literal = ast.literal_eval(value)
            except ValueError:
                literal = None
        case ast.FunctionDef(name=name):
            literal = None
        case _:
            return
    if not name.startswith("_"):
        yield name, literal


def _parameters(found: type, limits: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a class's constructor, as `vlm.config.target.parameters` returns them.

    Args:
        limits: Annotations that replace those of the source file, by parameter.
    Raises:
        Unreadable: The constructor is not found, or is made by a decorator or a metaclass.
    """
    for kind in found.__mro__[:-1]:
        source, node, complete, _ = _definitions[kind]
        methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
        if "__new__" in methods:
            break
        if "__init__" in methods:
            return dict(_of_method(methods["__init__"], source, limits))
        if not complete or node.decorator_list:
            break
    else:
        return {}
    raise Unreadable(found.__name__)


def _of_method(
    method: ast.FunctionDef, source: Source, limits: Mapping[str, Any]
) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yields the parameters of a method without `self`."""
    kinds, args = inspect.Parameter, method.args
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    listed: list[tuple[ast.arg, Any, ast.expr | None]] = [
        (arg, kinds.POSITIONAL_ONLY if arg in args.posonlyargs else kinds.POSITIONAL_OR_KEYWORD, default)
        for arg, default in zip(positional, [*defaults, *args.defaults], strict=True)
    ][1:]
    listed += [(args.vararg, kinds.VAR_POSITIONAL, None)] if args.vararg else []
    listed += [(arg, kinds.KEYWORD_ONLY, value) for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    for arg, kind, value in listed:
        hint = limits[arg.arg] if arg.arg in limits else _hint(arg.annotation, source)
        default: Any = kinds.empty
        if value is not None:
            try:
                default = _value(value, source)
            except Unreadable:
                default = ...
                hint = Any if isinstance(value, ast.Name | ast.Attribute) else hint  # its value may be None
        yield arg.arg, kinds(arg.arg, kind, default=default, annotation=hint)
    if args.kwarg is None:
        return
    match args.kwarg.annotation:
        case ast.Subscript(value=unpack, slice=options) if _resolve(unpack, source) is typing.Unpack:
            yield from _options(_resolve(options, source))
        case annotation:
            yield args.kwarg.arg, kinds(args.kwarg.arg, kinds.VAR_KEYWORD, annotation=_hint(annotation, source))


def _options(options: Any) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yields the keys of a TypedDict as parameters; optional ones have a default of ``...``."""
    if options not in _definitions or any(not _definitions[kind].complete for kind in options.__mro__[:-1]):
        raise Unreadable(str(options))
    for kind in reversed(options.__mro__[:-1]):
        source, node, _, _ = _definitions[kind]
        total = all(ast.literal_eval(word.value) for word in node.keywords if word.arg == "total")
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            hint, needed = statement.annotation, total
            if isinstance(hint, ast.Subscript):
                stated = _resolve(hint.value, source) if isinstance(hint.value, ast.Name | ast.Attribute) else None
                if stated in (typing.Required, typing.NotRequired):
                    hint, needed = hint.slice, stated is typing.Required
            default = inspect.Parameter.empty if needed else ...
            name = statement.target.id
            kind_only = inspect.Parameter.KEYWORD_ONLY
            yield name, inspect.Parameter(name, kind_only, default=default, annotation=_hint(hint, source))


def _value(node: ast.expr, source: Source) -> Any:
    """The value of a literal, or of a name of a module that stands for one."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if not isinstance(node, ast.Name):
        raise Unreadable(ast.unparse(node))
    found = _locate(source, node.id)
    if isinstance(found, tuple) and isinstance(found[0], Source) and isinstance(found[1], ast.expr):
        return _value(found[1], found[0])
    if isinstance(found, str):
        return found
    raise Unreadable(node.id)


def _hint(node: ast.expr | None, source: Source) -> Any:
    """The annotation that an expression stands for; Any if a part of it is not understood."""
    try:
        return Any if node is None else _annotation(node, source)
    except (Unreadable, TypeError, SyntaxError):
        return Any


def _annotation(node: ast.expr, source: Source) -> Any:
    match node:
        case ast.Constant(value=str() as text):
            return _annotation(ast.parse(text.strip(), mode="eval").body, source)
        case ast.Constant() if node.value in (None, ...):
            return node.value
        case ast.Name() | ast.Attribute():
            found = _resolve(node, source)
            ours = found not in _definitions or found.__module__.startswith("vlm.")
            if isinstance(found, Module) or not ours or (found in _definitions and _definitions[found].form != "class"):
                raise Unreadable(ast.unparse(node))
            return found
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_annotation(left, source), _annotation(right, source)]  # noqa: UP007
        case ast.Subscript(value=generic, slice=ast.Tuple(elts=inner)):
            return _generic(_resolve(generic, source), inner, source)
        case ast.Subscript(value=generic, slice=inner):
            return _generic(_resolve(generic, source), [inner], source)
    raise Unreadable(ast.unparse(node))


def _generic(generic: Any, inner: list[ast.expr], source: Source) -> Any:
    """The annotation ``generic[inner]``."""
    if generic in _definitions:
        raise Unreadable(generic.__name__)
    if generic is Literal:
        return Literal[tuple(_value(node, source) for node in inner)]
    if generic not in (Annotated, Injected):
        hints = tuple(_annotation(node, source) for node in inner)
        return generic[hints if len(hints) > 1 else hints[0]]
    extra = (INJECTED,) if generic is Injected else tuple(_condition(node, source) for node in inner[1:])
    hint = _hint(inner[0], source) if INJECTED in extra else _annotation(inner[0], source)
    return Annotated[hint, *extra]


def _condition(node: ast.expr, source: Source) -> Any:
    """A part of Annotated besides the type: a Limit of `vlm.errors`, or a plain value."""
    if not isinstance(node, ast.Call):
        return _value(node, source)
    kind = _resolve(node.func, source)
    if not (inspect.isclass(kind) and issubclass(kind, Limit)):
        raise Unreadable(ast.unparse(node))
    given = {str(word.arg): _value(word.value, source) for word in node.keywords}
    return kind(*(_value(argument, source) for argument in node.args), **given)
