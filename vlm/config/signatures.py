"""Signatures of classes, read from source files with `ast` instead of imports.

Importing torch and Lightning takes seconds. Misspelt keys and values of wrong types are found without them: a target
is followed through the imports of its package to its class, whose ``__init__`` has the parameters. Annotations of
builtins, ``typing``, `vlm.errors` and the classes and aliases of vlm are evaluated. Other annotations become Any,
which accepts every value; `vlm.config.target` then checks with the imported class.

Only the required parts of a file are parsed, because parsing complete files would take 0.2 s at every start.
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
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, Union

from vlm import errors
from vlm.config.target import PACKAGES, Signature, check_name, is_allowed, limits_of
from vlm.config.tree import Value
from vlm.errors import INJECTED, Injected, Limit

# Modules whose objects are used directly.
_IMPORTED_MODULES = {
    "builtins": builtins,
    "typing": typing,
    "typing_extensions": typing,
    "collections.abc": abc,
    "datetime": datetime,
    "pathlib": pathlib,
    "vlm.errors": errors,
}
# Types that check methods, which may be defined in a base class that is not read, such as torch's Module.
_STRUCTURAL = ("Callable", "Collection", "Container", "Generator", "Hashable", "Iterable", "Iterator", "Sized")

_DOCSTRING = re.compile(r'\A(?:\s*#.*\n|\s+)*[rR]?"""(?s:.*?)"""')
# The functions and classes of a module, with their decorators.
_BLOCK = re.compile(r"^(?:@.*\n(?:[ )].*\n|\n)*)*(async def|def|class) +(\w+)(?:.*\n?)(?:[ \t)].*\n?|\n|#.*\n)*", re.M)
# The methods of a class: the name; of the constructor, the parameters too.
_METHOD = re.compile(
    r"^    (?:async )?def (?:(__init__\((?s:.*?)\)(?: -> None)?):\n|(\w+)\()(?s:.*?)(?=^    [@\w\"]|\Z)", re.M
)


class UnreadableError(Exception):
    """The definition of a name is not found, or an expression is not supported."""


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


Binding: TypeAlias = ClassText | ast.expr | Import | None


class Source(NamedTuple):
    """A source file: its names with their definitions, or None for names bound at run time. Classes are not parsed."""

    name: str
    bound: Mapping[str, Binding]


class Definition(NamedTuple):
    """The definition of a class.

    Args:
        complete: Whether all base classes were found.
        form: Whether it is a Protocol or a TypedDict, which are not types of config values.
    """

    source: Source
    node: ast.ClassDef
    complete: bool
    form: Literal["class", "protocol", "dict"]


_definitions: dict[type, Definition] = {}


def read_signature(name: Value) -> Signature | None:
    """Returns the signature of a target from its source file; None if it cannot be read there.

    The signature's kind is an empty class with the name, the bases and the literal attributes of the target.

    Raises:
        UserError: The name is not allowed.
    """
    return _find_signature(check_name(name))


@cache
def _find_signature(name: str) -> Signature | None:
    module, _, attribute = name.rpartition(".")
    try:
        kind = _evaluate(_find_member(module, attribute))
        if kind not in _definitions or not is_allowed(f"{kind.__module__}."):
            return None
        return Signature(kind, _find_parameters(kind, limits_of(f"{kind.__module__}.{kind.__qualname__}")))
    except (UnreadableError, RecursionError):
        return None


@cache
def _find_source_file(module: str) -> Path | None:
    """Returns the source file of a module of PACKAGES; None if there is none."""
    if not any(f"{module}.".startswith(f"{package}.") or package.startswith(f"{module}.") for package in PACKAGES):
        return None
    first, *rest = module.split(".")
    for folder in _find_package_folders(first):
        path = Path(folder).joinpath(*rest)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None


@cache
def _find_package_folders(package: str) -> Sequence[str]:
    spec = find_spec(package)
    return (spec and spec.submodule_search_locations) or ()


@cache
def _read_module(module: str) -> Source:
    file = _find_source_file(module)
    if file is None or not any(f"{module}.".startswith(f"{package}.") for package in PACKAGES):
        raise UnreadableError(module)
    bound: dict[str, Binding] = {}

    def cut(block: re.Match[str]) -> str:
        bound[block[2]] = ClassText(block[2], block[0]) if block[1] == "class" else None
        return ""

    try:
        text = _BLOCK.sub(cut, _DOCSTRING.sub("", file.read_text(encoding="utf-8")))
        statements = ast.parse(text).body
    except (OSError, SyntaxError, ValueError) as error:
        raise UnreadableError(module) from error
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for statement in statements:
        bound |= _find_bindings(statement, package)
    return Source(module, bound)


def _parse_class(text: str) -> ast.ClassDef:
    """Parses a class without the bodies of its methods, or completely if these cannot be removed."""
    stripped = _METHOD.sub(lambda method: f"    def {method[1] or f'{method[2]}()'}: ...\n", text)
    for source in (stripped, text):
        try:
            (node,) = ast.parse(source).body
        except (SyntaxError, ValueError):
            continue
        if isinstance(node, ast.ClassDef):
            return node
    raise UnreadableError(text.partition("\n")[0])


def _find_bindings(statement: ast.stmt, package: str) -> Mapping[str, Binding]:
    """Returns the names that a statement of a module binds, with their definitions."""
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
    undecided: dict[str, None] = {}
    for node in ast.walk(statement):  # names in a condition or a loop are bound at run time
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                undecided[name] = None
            case ast.alias(name=name, asname=asname):
                undecided[asname or name] = None
    return undecided


def _find_definition(source: Source, name: str) -> Any:
    """Follows a name through imports to a Module, an imported object, or a source with an expression or a class.

    Raises:
        UnreadableError: There is no definition, or it is bound at run time.
    """
    bound = source.bound.get(name)
    if name not in source.bound and hasattr(builtins, name):
        return getattr(builtins, name)
    if bound is None:
        raise UnreadableError(name)
    if not isinstance(bound, Import):
        return source, bound
    return _find_member(bound.module, bound.name) if bound.name else Module(bound.module)


def _find_member(module: str, name: str) -> Any:
    if module in _IMPORTED_MODULES:
        if name in _STRUCTURAL or not hasattr(_IMPORTED_MODULES[module], name):
            raise UnreadableError(name)
        return getattr(_IMPORTED_MODULES[module], name)
    if _find_source_file(f"{module}.{name}") is not None:
        return Module(f"{module}.{name}")
    return _find_definition(_read_module(module), name)


def _evaluate(definition: Any) -> Any:
    """Evaluates the class or the expression that `_find_definition` returned; other results are returned unchanged."""
    if not (isinstance(definition, tuple) and isinstance(definition[0], Source)):
        return definition
    source, bound = definition
    return (
        _build_class(source.name, bound.name) if isinstance(bound, ClassText) else _evaluate_annotation(bound, source)
    )


def _resolve(node: ast.expr, source: Source) -> Any:
    """Returns the object that a name or an attribute of a module refers to."""
    match node:
        case ast.Name(id=name):
            return _evaluate(_find_definition(source, name))
        case ast.Attribute(value=owner, attr=name) if isinstance(module := _resolve(owner, source), Module):
            return _evaluate(_find_member(module.name, name))
    raise UnreadableError(ast.unparse(node))


@cache
def _build_class(module: str, name: str) -> type:
    """Returns an empty class with the name, the bases and the literal attributes of a class in a source file."""
    source = _read_module(module)
    text = source.bound[name]
    assert isinstance(text, ClassText)
    node = _parse_class(text.text)
    bases, complete = [], True
    form: Literal["class", "protocol", "dict"] = "class"
    foreign = not module.startswith("vlm.")
    defined = foreign and any(isinstance(method, ast.FunctionDef) and method.name == "__init__" for method in node.body)
    needed_bases = [] if defined else node.bases  # those of other packages are not needed if there is an __init__
    for expression in needed_bases:
        try:
            base = _resolve(expression.value if isinstance(expression, ast.Subscript) else expression, source)
        except UnreadableError:
            base = None
        if base in _definitions:
            bases.append(base)
            form = "dict" if _definitions[base].form == "dict" else form
        elif base in (typing.Protocol, typing.TypedDict):
            form = "protocol" if base is typing.Protocol else "dict"
        elif base not in (object, typing.Generic):
            complete = False
    attributes = {key: value for statement in node.body for key, value in _read_attributes(statement)}
    try:
        kind = type(name, tuple(bases), {**attributes, "__module__": module})
    except TypeError as error:  # no consistent method resolution order
        raise UnreadableError(name) from error
    _definitions[kind] = Definition(source, node, complete and not (node.keywords and form == "class"), form)
    return kind


def _read_attributes(statement: ast.stmt) -> Iterator[tuple[str, Value]]:
    """Yields the public attributes that a statement of a class defines; None for a value that is not a literal."""
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


def _find_parameters(target: type, limits: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a constructor, like `vlm.config.target.parameters`.

    Args:
        limits: Annotations that replace those of the source file, by parameter.
    Raises:
        UnreadableError: The constructor is not found, or a decorator or metaclass creates it.
    """
    for kind in target.__mro__[:-1]:
        source, node, complete, _ = _definitions[kind]
        methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
        if "__new__" in methods:
            break
        if "__init__" in methods:
            return dict(_read_parameters(methods["__init__"], source, limits))
        if not complete or node.decorator_list:
            break
    else:
        return {}
    raise UnreadableError(target.__name__)


def _read_parameters(
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
        hint = limits[arg.arg] if arg.arg in limits else _evaluate_hint(arg.annotation, source)
        default: Any = kinds.empty
        if value is not None:
            try:
                default = _evaluate_literal(value, source)
            except UnreadableError:
                default = ...
                hint = Any if isinstance(value, ast.Name | ast.Attribute) else hint  # its value may be None
        yield arg.arg, kinds(arg.arg, kind, default=default, annotation=hint)
    if args.kwarg is None:
        return
    match args.kwarg.annotation:
        case ast.Subscript(value=unpack, slice=options) if _resolve(unpack, source) is typing.Unpack:
            yield from _read_typed_dict(_resolve(options, source))
        case annotation:
            hint = _evaluate_hint(annotation, source)
            yield args.kwarg.arg, kinds(args.kwarg.arg, kinds.VAR_KEYWORD, annotation=hint)


def _read_typed_dict(options: Any) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yields the keys of a TypedDict as parameters; optional ones have a default of ``...``."""
    if options not in _definitions or any(not _definitions[kind].complete for kind in options.__mro__[:-1]):
        raise UnreadableError(str(options))
    for kind in reversed(options.__mro__[:-1]):
        source, node, _, _ = _definitions[kind]
        total = all(ast.literal_eval(word.value) for word in node.keywords if word.arg == "total")
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            hint, required = statement.annotation, total
            if isinstance(hint, ast.Subscript):
                marker = _resolve(hint.value, source) if isinstance(hint.value, ast.Name | ast.Attribute) else None
                if marker in (typing.Required, typing.NotRequired):
                    hint, required = hint.slice, marker is typing.Required
            default = inspect.Parameter.empty if required else ...
            name = statement.target.id
            kind_only = inspect.Parameter.KEYWORD_ONLY
            yield name, inspect.Parameter(name, kind_only, default=default, annotation=_evaluate_hint(hint, source))


def _evaluate_literal(node: ast.expr, source: Source) -> Any:
    """Returns the value of a literal, or of a module-level name that is bound to one."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if not isinstance(node, ast.Name):
        raise UnreadableError(ast.unparse(node))
    definition = _find_definition(source, node.id)
    if isinstance(definition, tuple) and isinstance(definition[0], Source) and isinstance(definition[1], ast.expr):
        return _evaluate_literal(definition[1], definition[0])
    if isinstance(definition, str):
        return definition
    raise UnreadableError(node.id)


def _evaluate_hint(node: ast.expr | None, source: Source) -> Any:
    """Returns the annotation of an expression; Any if a part of it is not supported."""
    try:
        return Any if node is None else _evaluate_annotation(node, source)
    except (UnreadableError, TypeError, SyntaxError):
        return Any


def _evaluate_annotation(node: ast.expr, source: Source) -> Any:
    match node:
        case ast.Constant(value=str() as text):
            return _evaluate_annotation(ast.parse(text.strip(), mode="eval").body, source)
        case ast.Constant() if node.value in (None, ...):
            return node.value
        case ast.Name() | ast.Attribute():
            kind = _resolve(node, source)
            if isinstance(kind, Module):
                raise UnreadableError(ast.unparse(node))
            if kind in _definitions and (not kind.__module__.startswith("vlm.") or _definitions[kind].form != "class"):
                raise UnreadableError(ast.unparse(node))
            return kind
        case ast.BinOp(left=first, op=ast.BitOr(), right=second):
            return Union[_evaluate_annotation(first, source), _evaluate_annotation(second, source)]  # noqa: UP007
        case ast.Subscript(value=generic, slice=ast.Tuple(elts=inner)):
            return _evaluate_generic(_resolve(generic, source), inner, source)
        case ast.Subscript(value=generic, slice=inner):
            return _evaluate_generic(_resolve(generic, source), [inner], source)
    raise UnreadableError(ast.unparse(node))


def _evaluate_generic(generic: Any, inner: list[ast.expr], source: Source) -> Any:
    """Returns the annotation ``generic[inner]``."""
    if generic in _definitions:
        raise UnreadableError(generic.__name__)
    if generic is Literal:
        return Literal[tuple(_evaluate_literal(node, source) for node in inner)]
    if generic not in (Annotated, Injected):
        hints = tuple(_evaluate_annotation(node, source) for node in inner)
        return generic[hints if len(hints) > 1 else hints[0]]
    extra = (INJECTED,) if generic is Injected else tuple(_evaluate_metadata(node, source) for node in inner[1:])
    hint = _evaluate_hint(inner[0], source) if INJECTED in extra else _evaluate_annotation(inner[0], source)
    return Annotated[hint, *extra]


def _evaluate_metadata(node: ast.expr, source: Source) -> Any:
    """Returns metadata of Annotated: a Limit of `vlm.errors`, or a plain value."""
    if not isinstance(node, ast.Call):
        return _evaluate_literal(node, source)
    kind = _resolve(node.func, source)
    if not (inspect.isclass(kind) and issubclass(kind, Limit)):
        raise UnreadableError(ast.unparse(node))
    given = {str(word.arg): _evaluate_literal(word.value, source) for word in node.keywords}
    return kind(*(_evaluate_literal(argument, source) for argument in node.args), **given)
