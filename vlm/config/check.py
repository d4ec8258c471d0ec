"""Checked instantiation: the one place that follows ``_target_``.

A node with ``_target_`` names a class (or a factory function of ours); its other keys are the keyword arguments. Before
anything is built, names and plain types are compared with the signature, so that a slip in a config costs a second and
not an epoch. A check reads the sources and imports nothing; ``build`` does.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from vlm.checkpoint.names import short
from vlm.config.target import find, load
from vlm.config.types import coerce, describe_mismatch, did_you_mean, fits, hints, nearest, show
from vlm.errors import UserError

_RESERVED = {"_target_", "_partial_"}


def check(
    config: dict[str, Any],
    supplied: Mapping[str, Collection[str]] | None = None,
    types: Mapping[str, Any] | None = None,
) -> None:
    """Compares every node that has a ``_target_`` with the signature of what it names; builds nothing.

    Args:
        config: The resolved config, plain containers.
        supplied: Path of a node -> names of the arguments that the program fills in when it builds it. They need not
            stand in the config, and must not.
        types: Path of a value that belongs to no ``_target_`` (such as ``seed``) -> the annotation it must fit.
    Raises:
        UserError: With a line for each fault, all of them at once.
    """
    found = list(faults(config, "", supplied or {}))
    for path, hint in (types or {}).items():
        value = _select(config, path)
        if not fits(value, hint):
            found.append(f"{path}: {describe_mismatch(value, hint)}")
    if found:
        raise UserError("\n".join(found))


def build(node: dict[str, Any], path: str, /, **given: Any) -> Any:
    """Checks a node and all below it, then builds it, innermost first.

    Args:
        node: A node with ``_target_``. With ``_partial_: true`` the result is a ``functools.partial``.
        path: Where the node stands in the config, for messages.
        given: Further keyword arguments of this node, those that only the program knows.
    Raises:
        UserError: Where the check finds faults, or a constructor refuses its values.
    """
    if not _is_target(node):
        raise UserError(f"{path}: names nothing to build; give it a _target_, or choose an option of its group")
    found = list(faults(node, path, {path: set(given)}))
    found += [f"{path}: {_name(node)} takes no {name}" for name in given if not _takes(node["_target_"], name)]
    if found:
        raise UserError("\n".join(found))
    return _instantiate(node, path, given)


def spec(node: dict[str, Any]) -> dict[str, Any]:
    """Turns a checked node into ``{"name": ..., "args": ...}``, the plain form that checkpoints store.

    A class of ours goes by its short name; nested nodes become the same form; a list becomes a tuple where the
    signature asks for one, as in ``build``, so that both ways give a class equal arguments.
    """
    if node.get("_partial_"):
        raise ValueError(f"{node['_target_']}: a partial cannot be stored")
    signature = hints(load(node["_target_"]))
    args = {
        key: coerce(_spec_value(value), signature.get(key, Any), paths=False)
        for key, value in node.items()
        if key not in _RESERVED
    }
    return {"name": short(node["_target_"]), "args": args}


def takes(node: dict[str, Any], argument: str) -> bool:
    """Whether what a node names takes an argument of this name."""
    return _takes(node["_target_"], argument)


def misfit(node: dict[str, Any], taker: dict[str, Any], argument: str) -> tuple[str, str] | None:
    """What a node gives and what is wanted, where the taker's argument of this name asks for something else.

    Like ``check`` it imports nothing. It is for what the program fills in, such as a task's model.

    Returns:
        Such as ``("Decoder", "Classifier")``; None where the two fit.
    """
    wanted = find(taker["_target_"]).parameters.get(argument)
    if wanted is None or fits(node, wanted.annotation, _product):
        return None
    return show(_product(node)), show(wanted.annotation)


def supply(value: Any, given: Mapping[str, Any]) -> Any:
    """A node with values filled in wherever it, or a node below it, names a class that takes them."""
    if not isinstance(value, dict):
        return [supply(child, given) for child in value] if isinstance(value, list) else value
    filled = {key: supply(child, given) for key, child in value.items()}
    if _is_target(value):
        filled |= {name: content for name, content in given.items() if _takes(value["_target_"], name)}
    return filled


def parameters(name: str) -> list[str]:
    """The keyword arguments that a target takes; none where it cannot be found."""
    try:
        target = find(name)
    except UserError:
        return []
    return [parameter.name for parameter in target.parameters.values() if parameter.kind in _KEYWORD]


def faults(value: Any, path: str, supplied: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Yields a line for each fault at and below a value of the config.

    Args:
        value: The value, plain containers.
        path: Its path in the config.
        supplied: As in ``check``.
    """
    if _is_target(value):
        yield from _node_faults(value, path, set(supplied.get(path, ())))
    for key, child in _children(value):
        yield from faults(child, f"{path}.{key}" if path else str(key), supplied)


_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _node_faults(node: dict[str, Any], path: str, supplied: set[str]) -> Iterator[str]:
    where = f"{path}." if path else ""
    try:
        target = find(node["_target_"])
    except UserError as error:
        yield f"{where}_target_: {error}"
        return
    if not isinstance(node.get("_partial_", False), bool):
        yield f"{where}_partial_: {describe_mismatch(node['_partial_'], bool)}"
    known = target.parameters
    names = {name for name, parameter in known.items() if parameter.kind in _KEYWORD}
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    for key, value in node.items():
        if key in _RESERVED:
            continue
        if key in supplied:
            yield f"{where}{key}: is filled in by the program; remove it"
        elif key in names:
            yield from _value_fault(f"{where}{key}", value, known[key])
        elif not anything or str(key).startswith("_"):
            yield f"{where}{key}: unknown{did_you_mean(nearest(str(key), names - supplied))}"
    if not node.get("_partial_"):
        required = [name for name in known if name in names and known[name].default is inspect.Parameter.empty]
        for name in required:
            if name not in node and name not in supplied:
                yield f"{where}{name}: missing; {_name(node)} needs it"


def _value_fault(path: str, value: Any, parameter: inspect.Parameter) -> Iterator[str]:
    forgotten = value is None and parameter.default is None  # an annotation that leaves out "| None"
    if not fits(value, parameter.annotation, _product) and not forgotten:
        yield f"{path}: {describe_mismatch(value, parameter.annotation, _product)}"


def _product(value: Any) -> Any:
    """What building a node gives: a class, ``partial``, or Any where that is unknown; None where it is no node."""
    if not _is_target(value):
        return None
    try:
        target = find(value["_target_"])
    except UserError:  # reported at the path of the name
        return Any
    return partial if value.get("_partial_") else target.product


def _instantiate(node: dict[str, Any], path: str, given: Mapping[str, Any]) -> Any:
    try:
        target = load(node["_target_"])
    except UserError as error:
        raise UserError(f"{path}._target_: {error}") from error
    signature = hints(target)
    kwargs = {
        key: coerce(_build_value(value, f"{path}.{key}"), signature.get(key, Any))
        for key, value in node.items()
        if key not in _RESERVED
    }
    if node.get("_partial_"):
        return partial(target, **kwargs, **given)
    try:
        return target(**kwargs, **given)
    except (ValueError, OSError, ImportError) as error:
        raise UserError(f"{path}: {_reason(error)}") from error
    except Exception as error:
        # Named, not imported: it is Lightning's word for a setting that this machine cannot serve.
        if type(error).__name__ == "MisconfigurationException":
            raise UserError(f"{path}: {_reason(error)}") from error
        raise


def _build_value(value: Any, path: str) -> Any:
    if _is_target(value):
        return _instantiate(value, path, {})
    if isinstance(value, dict):
        return {key: _build_value(child, f"{path}.{key}") for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_build_value(child, f"{path}.{index}") for index, child in enumerate(value)]
    return value


def _spec_value(value: Any) -> Any:
    if _is_target(value):
        return spec(value)
    if isinstance(value, dict):
        return {key: _spec_value(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_spec_value(child) for child in value]
    return value


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip()


def _is_target(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _select(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _name(node: dict[str, Any]) -> str:
    return str(node["_target_"]).rpartition(".")[2]


def _takes(name: str, argument: str) -> bool:
    try:
        known = find(name).parameters.values()
    except UserError:
        return True
    return any(p.kind is inspect.Parameter.VAR_KEYWORD or (p.kind in _KEYWORD and p.name == argument) for p in known)
