"""Checks a config against the signatures of the classes that it names, before anything is built.

A node with ``_target_`` names a class (or a factory function of a user's own package); its other keys are the keyword
arguments. Each node is checked once, innermost first, and then replaced by its Product.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from vlm.config.signatures import injects
from vlm.config.target import Signature, SignatureLookup, is_injected, signature
from vlm.config.tree import origins, transform
from vlm.config.types import Product, describe_mismatch, fits
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
