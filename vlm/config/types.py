"""Does a plain value from a config fit an annotation? And says in words where it does not."""

import inspect
import os
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from vlm.config.source import Unknown

_SEQUENCES = (list, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection, abc.MutableSequence, abc.Set)
_MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)


def hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a class's constructor or of a function, resolved one by one.

    An annotation that cannot be resolved (a name imported for type checkers alone) becomes Any, and only that one.
    """
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    scope = getattr(function, "__globals__", {})
    found = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        try:
            holder = types.SimpleNamespace(__annotations__={name: hint})
            found[name] = typing.get_type_hints(holder, globalns=scope)[name]
        except Exception:  # whatever evaluating a stranger's annotation may raise
            found[name] = Any
    return found


def fits(value: Any, hint: Any, product: Callable[[Any], Any] = lambda value: None) -> bool:
    """Whether a value of plain containers may be passed where the annotation stands.

    An int passes for a float, a list for a tuple, a str for a path; a bool does not pass for an int, nor a str for a
    number.

    Args:
        value: The value; nodes with ``_target_`` may stand in it.
        hint: The annotation.
        product: Says of such a node what building it gives (a class, ``functools.partial``, or Any), and None of any
            other value.
    """
    hint = _plain(hint)
    produced = product(value)
    if hint is Any or hint is object or produced is Any:
        return True
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, option, product) for option in args)
    if produced is not None:
        return _produces(produced, origin or hint)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in args)
    if hint is None or hint is type(None):
        return value is None
    kind = origin or hint
    if kind is tuple:
        return isinstance(value, list | tuple) and _fits_tuple(value, args, product)
    if kind in _SEQUENCES:
        item = (args or (Any,))[0]
        return isinstance(value, list | tuple) and all(fits(v, item, product) for v in value)
    if kind in _MAPPINGS:
        key, item = args or (Any, Any)
        return isinstance(value, dict) and all(fits(k, key) and fits(v, item, product) for k, v in value.items())
    return _fits_class(value, kind)


def coerce(value: Any, hint: Any, paths: bool = True) -> Any:
    """Makes a list a tuple where only a tuple is wanted and, with ``paths``, a str a Path where only that is."""
    hint = _plain(hint)
    origin, args = get_origin(hint), get_args(hint)
    options = [_plain(option) for option in args] if origin in (Union, types.UnionType) else [hint]
    kinds = [get_origin(option) or option for option in options]
    if isinstance(value, list) and tuple in kinds and not any(kind in _SEQUENCES for kind in kinds):
        inner = get_args(options[kinds.index(tuple)])
        items = inner[:1] * len(value) if inner[1:] == (...,) else inner or (Any,) * len(value)
        return tuple(coerce(item, item_hint, paths) for item, item_hint in zip(value, items, strict=False))
    if paths and isinstance(value, str) and Path in kinds and str not in kinds:
        return Path(value)
    return value


def describe_mismatch(value: Any, hint: Any, product: Callable[[Any], Any] = lambda value: None) -> str:
    """Says what a value is and what was expected, such as ``'abc' is str, expected int | None``."""
    choices = list(dict.fromkeys(str(choice) for choice in _choices(hint)))
    if choices and isinstance(value, str):
        near = did_you_mean(nearest(value, choices))
        return f"{value!r} is unknown; choose from {', '.join(choices)}{near}"
    if product(value) is not None:
        return f"{show(product(value))} does not fit here, expected {show(hint)}"
    text = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    is_what = "" if value is None else f" is {type(value).__name__}"
    return f"{text}{is_what}, expected {show(hint)}"


def nearest(name: str, names: Iterable[str]) -> str:
    """The most alike of the names, or nothing; capitals count for little."""
    known = {known.lower(): known for known in sorted(names, reverse=True)}
    alike = get_close_matches(name.lower(), known, n=1)
    return known[alike[0]] if alike else ""


def did_you_mean(name: str) -> str:
    """The end of a message, where there is a nearest name."""
    return f"; did you mean {name}?" if name else ""


def show(hint: Any) -> str:
    """An annotation as one writes it today: ``int | None`` for ``Optional[int]``."""
    hint = _plain(hint)
    origin, args = get_origin(hint), get_args(hint)
    if hint is None or hint is type(None):
        return "None"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(show(option) for option in args))
    if origin is Literal:
        return " | ".join(repr(option) for option in args)
    name = getattr(origin or hint, "__name__", str(hint))
    if not args or origin is abc.Callable:
        return name
    return f"{name}[{', '.join('...' if option is ... else show(option) for option in args)}]"


def _plain(hint: Any) -> Any:
    """Without Annotated and NewType around it; a type variable says nothing."""
    if get_origin(hint) is typing.Annotated:
        return _plain(get_args(hint)[0])
    if isinstance(hint, typing.NewType):
        return _plain(hint.__supertype__)
    unknown = hint is inspect.Parameter.empty or isinstance(hint, typing.TypeVar | typing.ForwardRef | str)
    return Any if unknown else hint


def _produces(produced: Any, kind: Any) -> bool:
    produced = get_origin(produced) or produced
    if not inspect.isclass(kind) or not inspect.isclass(produced):
        return kind is not Literal
    if getattr(kind, "_protocol", False) or getattr(kind, "_is_protocol", False) or Unknown in produced.__mro__:
        return True
    # By name: one of the two may stand in for a class that the other's module has imported.
    names = {(base.__module__, base.__qualname__) for base in produced.__mro__}
    return (kind.__module__, kind.__qualname__) in names or issubclass(produced, kind)


def _fits_tuple(value: list[Any] | tuple[Any, ...], args: tuple[Any, ...], product: Callable[[Any], Any]) -> bool:
    if not args:
        return True
    if args[1:] == (...,):
        return all(fits(item, args[0], product) for item in value)
    return len(value) == len(args) and all(map(fits, value, args, [product] * len(args)))


def _fits_class(value: Any, kind: Any) -> bool:
    if not inspect.isclass(kind):
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind in (abc.Callable, type):
        return False
    if issubclass(kind, os.PathLike):
        return isinstance(value, str | os.PathLike)
    try:
        return isinstance(value, kind)
    except TypeError:  # a Protocol that cannot be asked
        return True


def _choices(hint: Any) -> list[Any]:
    """What a value may be, where the annotation is a closed list of literals (and perhaps None)."""
    hint = _plain(hint)
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) not in (Union, types.UnionType):
        return []
    parts = [option for option in get_args(hint) if option is not type(None)]
    lists = [_choices(option) for option in parts]
    return [choice for some in lists for choice in some] if all(lists) else []
