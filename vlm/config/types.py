"""Checks plain config values against annotations, converts them, and describes mismatches."""

import inspect
import json
import math
import os
import types
import typing
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from vlm.config.tree import Value
from vlm.errors import Limit, did_you_mean, find_similar

_SEQUENCES = (list, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection, abc.MutableSequence, abc.Set)
_MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
_NUMBERS = {int: int, float: int | float}  # an int is accepted as a float
_JSON_TYPES = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    bool: ("true or false", "booleans"),
}


@dataclass(frozen=True)
class Product:
    """Stands for the object that a node builds: an instance of ``kind``, or of Any if the type is unknown."""

    kind: Any

    def __repr__(self) -> str:
        return show(self.kind)


def hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the resolved annotations of a constructor or function.

    Annotations that cannot be resolved, such as names imported for type checkers only, become Any.
    """
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    scope = getattr(function, "__globals__", {})
    resolved = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        try:
            holder = types.SimpleNamespace(__annotations__={name: hint})
            resolved[name] = typing.get_type_hints(holder, globalns=scope, include_extras=True)[name]
        except Exception:  # evaluating an arbitrary annotation may raise anything
            resolved[name] = Any
    return resolved


def fits(value: "Value | Product", hint: Any, bounded: bool = True) -> bool:
    """Returns True if a plain value matches an annotation.

    ============================  =======================================================================
    annotation                    values that fit
    ============================  =======================================================================
    Any, a type variable          all
    Annotated[A, Limit]           those of A within the limit
    A | B                         those of A and those of B
    Literal["a", 1]               "a" and 1, of the same type
    tuple[A, B]; tuple[A, ...]    lists of an A and a B; lists of As
    list, set, Sequence[A]        lists of As
    dict, Mapping[K, V]           dicts of Ks to Vs
    float; int                    numbers, no bools; ints, no bools
    Path                          str
    a class C                     Product(D), D a subclass of C; plain values that are instances of C
    ============================  =======================================================================

    Args:
        bounded: Whether to check limits too, not only the type.
    """
    kind, args, limits = _split_annotation(hint)
    inner = partial(fits, bounded=bounded)
    if bounded and not all(limit.holds(value) for limit in limits):
        return False
    if kind is Union:
        return any(inner(value, option) for option in args)
    if kind in (Any, object):
        return True
    if isinstance(value, Product):
        produced = get_origin(value.kind) or value.kind
        if produced is Any:
            return True
        if not inspect.isclass(kind) or not inspect.isclass(produced):
            return kind is not Literal
        return getattr(kind, "_is_protocol", False) or issubclass(produced, kind)
    if kind is Literal:
        return any(value == option and type(value) is type(option) for option in args)
    if kind is tuple and args and args[1:] != (...,):
        return isinstance(value, list | tuple) and len(value) == len(args) and all(map(inner, value, args))
    if kind is tuple or kind in _SEQUENCES:
        return isinstance(value, list | tuple) and all(inner(item, (args or (Any,))[0]) for item in value)
    if kind in _MAPPINGS:
        key, item = args or (Any, Any)
        return isinstance(value, dict) and all(inner(k, key) and inner(v, item) for k, v in value.items())
    return _is_instance(value, kind)


def coerce(value: Value, hint: Any, paths: bool = True) -> Any:
    """Converts a list to a tuple if only that fits and, with ``paths``, a str to a Path if only that fits."""
    kind, args, _ = _split_annotation(hint)
    options = [_split_annotation(option) for option in args] if kind is Union else [(kind, args, ())]
    wanted = {kind: inner for kind, inner, _ in options}
    if isinstance(value, list) and tuple in wanted and not any(kind in _SEQUENCES for kind in wanted):
        inner = wanted[tuple]
        items = inner[:1] * len(value) if inner[1:] == (...,) else inner or (Any,) * len(value)
        return tuple(coerce(item, item_hint, paths) for item, item_hint in zip(value, items, strict=False))
    if paths and isinstance(value, str) and Path in wanted and str not in wanted:
        return Path(value)
    return value


def describe_mismatch(value: "Value | Product", hint: Any) -> str:
    """Describes a value that does not match, such as ``'abc' is str, expected int | None``."""
    choices = list(dict.fromkeys(str(choice) for choice in _choices(hint)))
    if choices and isinstance(value, str):
        near = did_you_mean(find_similar(value, choices))
        return f"{value!r} is unknown; choose from {', '.join(choices)}{near}"
    if isinstance(value, Product):
        return f"{value!r} does not fit here, expected {show(hint)}"
    text = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    if not fits(value, hint, bounded=False):
        is_type = "" if value is None else f" is {type(value).__name__}"
        return f"{text}{is_type}, expected {show(hint, bounded=False)}"
    if isinstance(value, str):
        return f"{text}, expected {show(hint)}"
    finite = not isinstance(value, float) or math.isfinite(value)
    return f"{text} is {'out of range' if finite else 'not finite'}, expected {show(hint)}"


def describe_json_mismatch(value: Value, hint: Any) -> str:
    """Describes a mismatch in JSON terms, such as ``expected an integer, not "abc"``."""
    text = json.dumps(value, ensure_ascii=False)
    return f"expected {describe_json_type(hint)}, not {text if len(text) <= 60 else f'{text[:57]}...'}"


def describe_json_type(hint: Any, *, plural: bool = False) -> str:
    """Describes an annotation in JSON terms, without null: ``an integer (at least 1)`` for ``Count | None``."""
    kind, args, limits = _split_annotation(hint)
    bounds = " and ".join(filter(None, map(str, limits)))
    if bounds:
        return f"{describe_json_type(_unwrap(hint), plural=plural)} ({bounds})"
    if kind is Union:
        options = [describe_json_type(option, plural=plural) for option in args if option is not type(None)]
        return " or ".join(dict.fromkeys(options))
    if kind is Literal:
        return " or ".join(json.dumps(option) for option in args)
    if kind in _SEQUENCES or kind is tuple or kind in _MAPPINGS:
        name, of = ("objects" if kind in _MAPPINGS else "lists"), args[-1:]
        name = name if plural else "an object" if kind in _MAPPINGS else "a list"
        return f"{name} of {describe_json_type(of[0], plural=True)}" if of and of[0] is not Any else name
    names = _JSON_TYPES.get(kind)
    return getattr(kind, "__name__", str(kind)) if names is None else names[plural]


def show(hint: Any, bounded: bool = True) -> str:
    """Formats an annotation: ``int | None`` for ``Optional[int]``, ``int (at least 1)`` with a limit."""
    kind, args, limits = _split_annotation(hint)
    if limits and bounded:
        return f"{show(_unwrap(hint))} ({' and '.join(map(str, limits))})"
    if kind is type(None):
        return "None"
    if kind is Union:
        return " | ".join(dict.fromkeys(show(option, bounded) for option in args))
    if kind is Literal:
        return " | ".join(repr(option) for option in args)
    name = getattr(kind, "__name__", str(kind))
    if not args or kind is abc.Callable:
        return name
    return f"{name}[{', '.join('...' if option is ... else show(option, bounded) for option in args)}]"


def _split_annotation(hint: Any) -> tuple[Any, tuple[Any, ...], tuple[Limit, ...]]:
    """Splits an annotation into kind (a class, Union, Literal or Any), arguments and limits."""
    limits = tuple(item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Limit))
    hint = _unwrap(hint)
    kind = get_origin(hint) or hint
    if kind is types.UnionType:
        kind = Union
    if kind is None:
        kind = type(None)
    if kind is inspect.Parameter.empty or isinstance(kind, typing.TypeVar | typing.ForwardRef | str):
        kind = Any
    return kind, get_args(hint), limits


def _unwrap(hint: Any) -> Any:
    """Returns an annotation without the Annotated and NewType around it."""
    while get_origin(hint) is Annotated or isinstance(hint, typing.NewType):
        hint = hint.__supertype__ if isinstance(hint, typing.NewType) else get_args(hint)[0]
    return hint


def _is_instance(value: Value, kind: Any) -> bool:
    if not inspect.isclass(kind):
        return True
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    if kind in (abc.Callable, type):
        return False
    if issubclass(kind, os.PathLike):
        return isinstance(value, str | os.PathLike)
    try:
        return isinstance(value, kind)
    except TypeError:  # a Protocol without isinstance checks
        return True


def _choices(hint: Any) -> list[Any]:
    """Returns the values of an annotation that consists of literals and None; empty for other annotations."""
    kind, args, _ = _split_annotation(hint)
    if kind is Literal:
        return list(args)
    lists = [_choices(option) for option in args if option is not type(None)] if kind is Union else []
    return [choice for choices in lists for choice in choices] if all(lists) else []
