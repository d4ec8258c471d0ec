"""Instantiates a config after checking it against the signatures of the classes that it names."""

import inspect
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from vlm.config.names import short
from vlm.config.signatures import injects
from vlm.config.target import Signature, SignatureLookup, arguments, find, is_injected, parameters, signature, takes_any
from vlm.config.tree import origins, transform
from vlm.config.types import Product, coerce, describe_mismatch, fits
from vlm.errors import UserError, did_you_mean, nearest

RESERVED = ("_target_", "_partial_")


def check(
    config: dict[str, Any],
    tree: dict[str, Any] | None = None,
    *,
    types: Mapping[str, Any] | None = None,
    injected: Mapping[str, Collection[str]] | None = None,
    look_up: SignatureLookup = signature,
) -> None:
    """Compares every node that has a ``_target_`` with the signature of the class it names; builds nothing.

    Args:
        config: The resolved config, plain containers.
        tree: The config with its interpolations, which lead to the keys where values are set; None if it has none.
        types: Annotations of values that belong to no ``_target_``, such as ``seed``, by key.
        injected: Arguments that the program supplies, by path of the node, besides those annotated as Injected.
        look_up: Returns the signature of a target; a node whose signature it does not know is not checked.
    Raises:
        UserError: With a line for each fault, named by the key where the value is set.
    """
    faults: list[str] = []

    def look(node: dict[str, Any], raw: dict[str, Any], path: str) -> Product:
        try:
            if (known := look_up(node["_target_"])) is None:
                return Product(Any)
            found = _node_faults(known, node, raw, (injected or {}).get(path, ()), look_up)
            faults.extend(f"{path}.{fault}" for fault in found)
            return product(node, look_up)
        except UserError as error:
            faults.append(f"{path}._target_: {error}")
            return Product(Any)

    transform(config, look)
    for key, hint in (types or {}).items():
        if not fits(config.get(key), hint):
            faults.append(f"{key}: {describe_mismatch(config.get(key), hint)}")
    if faults:
        raise UserError("\n".join(origins(tree or config, faults)))


def _node_faults(
    signature: Signature,
    node: dict[str, Any],
    raw: dict[str, Any],
    injected: Collection[str],
    look_up: SignatureLookup,
) -> Iterator[str]:
    known = signature.arguments
    filled = {name for name, parameter in known.items() if is_injected(parameter)}
    if not isinstance(node.get("_partial_", False), bool):
        yield f"_partial_: {describe_mismatch(node['_partial_'], bool)}"
    for key in [key for key in node if key not in RESERVED]:
        if key in known and key not in filled:
            forgotten = node[key] is None and known[key].default is None  # an annotation that leaves out "| None"
            if not forgotten and not fits(node[key], known[key].annotation):
                yield f"{key}: {describe_mismatch(node[key], known[key].annotation)}"
        elif injects(raw, key, look_up):
            yield f"{key}: is filled in by the program; remove it"
        elif not signature.takes_any or str(key).startswith("_"):
            yield f"{key}: unknown{did_you_mean(nearest(str(key), known.keys() - filled))}"
    if not node.get("_partial_"):
        for name, parameter in known.items():
            if parameter.default is inspect.Parameter.empty and name not in {*node, *filled, *injected}:
                yield f"{name}: missing; {node['_target_'].rpartition('.')[2]} needs it"


def product(node: Mapping[str, Any], look_up: SignatureLookup = signature) -> Product:
    """The type of the object that a node builds."""
    known = look_up(node["_target_"])
    return Product(Any if known is None else partial if node.get("_partial_") else known.kind)


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
