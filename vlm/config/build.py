"""Instantiates a checked config. No other module calls what a ``_target_`` names."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vlm.config.check import RESERVED
from vlm.config.names import short
from vlm.config.target import arguments, find, parameters, takes_any
from vlm.config.tree import transform
from vlm.config.types import coerce
from vlm.errors import UserError


def build(node: Any, path: str, /, **injected: Any) -> Any:
    """Builds a checked node and all below it, innermost first.

    Args:
        node: A node with ``_target_``. With ``_partial_: true`` the result is a ``functools.partial``.
        path: Key of the node in the config, for messages.
        injected: Values that only the program knows; those that the node's class takes are passed to it.
    Raises:
        UserError: The node names nothing, or a constructor refuses its values.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        raise UserError(f"{path}: names nothing to build; give it a _target_, or choose an option of its group")
    own = {name: value for name, value in injected.items() if takes(node, name)}
    return transform(node, lambda inner, raw, at: _call(inner, at, own if raw is node else {}), path)


def spec(node: dict[str, Any]) -> dict[str, Any]:
    """Converts a checked node to ``{"name": ..., "args": ...}``, the form that checkpoints store.

    Classes of vlm are stored by their short name, and nested nodes in the same form. A list becomes a tuple if the
    signature asks for one, as in ``build``, so that both give a class equal arguments.
    """
    return transform(node, lambda inner, raw, at: _spec(inner))


def takes(node: Mapping[str, Any], argument: str) -> bool:
    """Returns True if the class of a node has an argument of this name."""
    target = find(node["_target_"])
    return argument in arguments(target) or takes_any(target)


def _spec(node: dict[str, Any]) -> dict[str, Any]:
    if node.get("_partial_"):
        raise ValueError(f"{node['_target_']}: a partial cannot be stored")
    return {"name": short(node["_target_"]), "args": _kwargs(node, paths=False)}


def _call(node: dict[str, Any], path: str, injected: dict[str, Any]) -> Any:
    target = find(node["_target_"])
    kwargs = _kwargs(node) | injected
    if node.get("_partial_"):
        return partial(target, **kwargs)
    try:
        return target(**kwargs)
    except Exception as error:
        # Compared by name, without importing Lightning: its error for a setting that this machine does not support.
        expected = type(error).__name__ == "MisconfigurationException"
        # A TypeError in another package comes from a setting whose annotation is too loose; in vlm it is a bug.
        theirs = (TypeError, OverflowError) if target.__module__.partition(".")[0] != "vlm" else ()
        if not expected and not isinstance(error, (ValueError, OSError, ImportError, *theirs)):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
        raise UserError(f"{path}: {reason}") from error


def _kwargs(node: dict[str, Any], paths: bool = True) -> dict[str, Any]:
    known = parameters(find(node["_target_"]))
    hints = {key: known[key].annotation if key in known else Any for key in node if key not in RESERVED}
    return {key: coerce(node[key], hint, paths=paths) for key, hint in hints.items()}
