"""Instantiates a config after checking it against the signatures of the classes that it names."""

import inspect
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from vlm.config.signatures import read_signature
from vlm.config.target import Signature, SignatureLookup, find, is_injected, parameters, shorten_name, signature
from vlm.config.tree import Tree, Value, origins, transform
from vlm.config.types import Product, coerce, describe_mismatch, fits
from vlm.errors import UserError, did_you_mean, find_similar

RESERVED = ("_target_", "_partial_")


def quick_signature(name: Value) -> Signature:
    """Returns the signature of a target, from its source file if it can be read there; else imports the target.

    Raises:
        UserError: As `vlm.config.target.find`.
    """
    return read_signature(name) or signature(name)


def arguments_of(node: Value, look_up: SignatureLookup = quick_signature) -> dict[str, inspect.Parameter]:
    """Returns the arguments of a node's class; empty if it is not a node or its class may not be built."""
    try:
        target = look_up(node["_target_"]) if isinstance(node, Mapping) and "_target_" in node else None
        return target.arguments if target else {}
    except UserError:
        return {}


def injects(node: Value, argument: str, look_up: SignatureLookup = quick_signature) -> bool:
    """Returns True if the program supplies an argument of this name to a node's class, or to one below it."""
    if parameter := arguments_of(node, look_up).get(argument):
        return is_injected(parameter)
    return isinstance(node, Mapping) and any(injects(child, argument, look_up) for child in node.values())


def check(
    config: Tree,
    tree: Tree | None = None,
    *,
    types: Mapping[str, Any] | None = None,
    injected: Mapping[str, Collection[str]] | None = None,
    look_up: SignatureLookup = signature,
) -> None:
    """Checks every node with a ``_target_`` against the signature of the class that it names, without building it.

    Args:
        config: The resolved config, plain containers.
        tree: The config with its interpolations, which determine the keys to report; None if it has none.
        types: Annotations of keys outside of nodes, such as ``seed``.
        injected: Arguments that the program supplies, by path of the node, in addition to those annotated as Injected.
        look_up: Returns the signature of a target, or None, in which case the node is not checked.
    Raises:
        UserError: With a line per fault, which names the key where the value is set.
    """
    faults: list[str] = []

    def check_node(node: Tree, raw: Tree, path: str) -> Product:
        try:
            if (signature := look_up(node["_target_"])) is None:
                return Product(Any)
            node_faults = _node_faults(signature, node, raw, (injected or {}).get(path, ()), look_up)
            faults.extend(f"{path}.{fault}" for fault in node_faults)
            return product(node, look_up)
        except UserError as error:
            faults.append(f"{path}._target_: {error}")
            return Product(Any)

    transform(config, check_node)
    for key, hint in (types or {}).items():
        if not fits(config.get(key), hint):
            faults.append(f"{key}: {describe_mismatch(config.get(key), hint)}")
    if faults:
        raise UserError("\n".join(origins(tree or config, faults)))


def _node_faults(
    signature: Signature,
    node: Tree,
    raw: Tree,
    injected: Collection[str],
    look_up: SignatureLookup,
) -> Iterator[str]:
    parameters = signature.arguments
    supplied = {name for name, parameter in parameters.items() if is_injected(parameter)}
    if not isinstance(node.get("_partial_", False), bool):
        yield f"_partial_: {describe_mismatch(node['_partial_'], bool)}"
    for key in [key for key in node if key not in RESERVED]:
        if key in parameters and key not in supplied:
            is_optional = node[key] is None and parameters[key].default is None  # its annotation lacks "| None"
            if not is_optional and not fits(node[key], parameters[key].annotation):
                yield f"{key}: {describe_mismatch(node[key], parameters[key].annotation)}"
        elif injects(raw, key, look_up):
            yield f"{key}: is set by the program; remove it"
        elif not signature.takes_any or str(key).startswith("_"):
            yield f"{key}: unknown{did_you_mean(find_similar(str(key), parameters.keys() - supplied))}"
    if not node.get("_partial_"):
        for name, parameter in parameters.items():
            if parameter.default is inspect.Parameter.empty and name not in {*node, *supplied, *injected}:
                yield f"{name}: missing; {str(node['_target_']).rpartition('.')[2]} needs it"


def product(node: Tree, look_up: SignatureLookup = signature) -> Product:
    """Returns the type of the object that a node builds."""
    signature = look_up(node["_target_"])
    return Product(Any if signature is None else partial if node.get("_partial_") else signature.kind)


def build(node: Value, path: str, /, **injected: Any) -> Any:
    """Builds a checked node and all nodes below it, innermost first.

    Args:
        node: A node with ``_target_``. With ``_partial_: true`` the result is a ``functools.partial``.
        path: Key of the node in the config, for messages.
        injected: Further arguments from the program; passed if the node's class takes them.
    Raises:
        UserError: The node has no class, or a constructor rejects its values.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        raise UserError(f"{path}: has no class to build; give it a _target_, or choose an option of its group")
    extra = {name: value for name, value in injected.items() if takes_argument(node, name)}
    return transform(node, lambda inner, raw, at: _call(inner, at, extra if raw is node else {}), path)


def spec(node: Tree) -> Tree:
    """Converts a checked node to ``{"name": ..., "args": ...}``, the form that checkpoints store.

    Classes of vlm are stored by their short name, and nested nodes in the same form. A list becomes a tuple if the
    annotation requires one, as in ``build``, so that both pass equal arguments to a class.
    """

    def convert(inner: Tree, raw: Tree, path: str) -> Tree:
        if inner.get("_partial_"):
            raise ValueError(f"{inner['_target_']}: a partial cannot be stored")
        return {"name": shorten_name(str(inner["_target_"])), "args": _kwargs(inner, paths=False)}

    return transform(node, convert)


def takes_argument(node: Tree, argument: str) -> bool:
    """Returns True if the class of a node has an argument of this name."""
    target = signature(node["_target_"])
    return argument in target.arguments or target.takes_any


def _call(node: Tree, path: str, injected: dict[str, Any]) -> Any:
    target = find(node["_target_"])
    kwargs = _kwargs(node) | injected
    if node.get("_partial_"):
        return partial(target, **kwargs)
    try:
        return target(**kwargs)
    except Exception as error:
        # Lightning's error for a setting that this machine does not support, compared by name to avoid the import.
        expected = type(error).__name__ == "MisconfigurationException"
        # In other packages, a TypeError comes from a setting whose annotation is too loose; in vlm it is a bug.
        external_errors = (TypeError, OverflowError) if target.__module__.partition(".")[0] != "vlm" else ()
        if not expected and not isinstance(error, (ValueError, OSError, ImportError, *external_errors)):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
        raise UserError(f"{path}: {reason}") from error


def _kwargs(node: Tree, paths: bool = True) -> dict[str, Any]:
    """Returns the arguments of a node, converted to the annotated types."""
    by_name = parameters(find(node["_target_"]))
    hints = {key: by_name[key].annotation if key in by_name else Any for key in node if key not in RESERVED}
    return {key: coerce(node[key], hint, paths=paths) for key, hint in hints.items()}
