"""Finds the text that a chat template writes by parsing it."""

import re
from collections.abc import Iterable, Iterator

from jinja2 import Environment, TemplateError, nodes

VIDEO = "<video>"
CHANGES = {"upper", "lower", "capitalize", "title", "replace", "trim", "bos_token", "eos_token"}
TOOLS = re.compile("tool|ipython")  # names that occur only in conversations with tools


def find_pieces(template: str) -> frozenset[str]:
    """Returns the pieces that a template writes for a conversation without tools; empty if it cannot be parsed.

    They are literal text (stripped), strings that it prints, and the names in CHANGES that it uses. Single spaces are
    omitted.
    """
    try:
        body = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template).body
        return frozenset({*_find_output(body)} - {"", " ", VIDEO})
    except (TemplateError, RecursionError):
        return frozenset()


def _find_output(body: Iterable[nodes.Node]) -> Iterator[str]:
    """Yields the output of statements, in all branches that may be executed."""
    for node in body:
        if isinstance(node, nodes.If):
            for branch in (node, *node.elif_):
                if (holds := _evaluate(branch.test)) is not False:
                    yield from _find_output(branch.body)
                if holds:
                    break
            else:
                yield from _find_output(node.else_)
        elif isinstance(node, nodes.For):
            yield from _find_output(node.else_ if _evaluate(node.iter) is False else node.body)
        elif isinstance(node, nodes.TemplateData):
            yield node.data.strip()
        elif isinstance(node, nodes.Const):
            yield from [node.value] if isinstance(node.value, str) else []
        elif isinstance(node, nodes.Assign) and _mentions_tools(node.target):
            continue
        elif not (isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and "raise" in node.node.name):
            yield from CHANGES & {str(getattr(node, name, None)) for name in ("name", "attr")}
            keys = [node.arg] if isinstance(node, nodes.Getitem) else []
            yield from _find_output(child for child in node.iter_child_nodes() if child not in keys)


def _evaluate(test: nodes.Node) -> bool | None:
    """Returns the value of a condition in a conversation without tools; None if it depends on anything else."""
    match test:
        case nodes.Not():
            return None if (inner := _evaluate(test.node)) is None else not inner
        case nodes.And() | nodes.Or():
            values, decides = {_evaluate(test.left), _evaluate(test.right)}, isinstance(test, nodes.Or)
            return decides if decides in values else None if None in values else not decides
        case nodes.Test(name="none" | "defined" as name):
            return (name == "none") if _evaluate(test.node) is False else None
        case nodes.Compare(ops=[nodes.Operand(op="ne")]):
            return True if _mentions_tools(test) else None
        case _:
            return False if _mentions_tools(test) else None


def _mentions_tools(node: nodes.Node) -> bool:
    """Returns True if an expression contains a name that occurs only in conversations with tools."""
    inner = (node, *node.find_all(nodes.Node))
    names = (getattr(child, key, None) for child in inner for key in ("name", "attr", "value"))
    return any(isinstance(name, str) and TOOLS.search(name) for name in names)
