"""Finds the text that a chat template writes by parsing it."""

import re
from collections.abc import Iterable, Iterator

from jinja2 import Environment, TemplateError, nodes

FILMS = "<video>"
CHANGES = {"upper", "lower", "capitalize", "title", "replace", "trim", "bos_token", "eos_token"}
TOOLS = re.compile("tool|ipython")  # names that occur only in conversations with tools


def pieces(template: str) -> frozenset[str]:
    """Returns the pieces that a template writes for a conversation without tools; empty if it cannot be parsed.

    They are literal text (stripped), strings that it prints, and the names in CHANGES that it uses. Single spaces are
    left out.
    """
    try:
        body = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template).body
        return frozenset({*_written(body)} - {"", " ", FILMS})
    except (TemplateError, RecursionError):
        return frozenset()


def _written(body: Iterable[nodes.Node]) -> Iterator[str]:
    """Yields what statements write, in all branches that may be taken."""
    for node in body:
        if isinstance(node, nodes.If):
            for branch in (node, *node.elif_):
                if (holds := _holds(branch.test)) is not False:
                    yield from _written(branch.body)
                if holds:
                    break
            else:
                yield from _written(node.else_)
        elif isinstance(node, nodes.For):
            yield from _written(node.else_ if _holds(node.iter) is False else node.body)
        elif isinstance(node, nodes.TemplateData):
            yield node.data.strip()
        elif isinstance(node, nodes.Const):
            yield from [node.value] if isinstance(node.value, str) else []
        elif isinstance(node, nodes.Assign) and _of_tools(node.target):
            continue
        elif not (isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and "raise" in node.node.name):
            yield from CHANGES & {str(getattr(node, name, None)) for name in ("name", "attr")}
            keys = [node.arg] if isinstance(node, nodes.Getitem) else []
            yield from _written(child for child in node.iter_child_nodes() if child not in keys)


def _holds(test: nodes.Node) -> bool | None:
    """The value of a condition in a conversation without tools; None if it depends on other things."""
    match test:
        case nodes.Not():
            return None if (inner := _holds(test.node)) is None else not inner
        case nodes.And() | nodes.Or():
            known, decides = {_holds(test.left), _holds(test.right)}, isinstance(test, nodes.Or)
            return decides if decides in known else None if None in known else not decides
        case nodes.Test(name="none" | "defined" as name):
            return (name == "none") if _holds(test.node) is False else None
        case nodes.Compare(ops=[nodes.Operand(op="ne")]):
            return True if _of_tools(test) else None
        case _:
            return False if _of_tools(test) else None


def _of_tools(node: nodes.Node) -> bool:
    """Returns True if an expression contains a name that occurs only in conversations with tools."""
    names = (getattr(one, key, None) for one in (node, *node.find_all(nodes.Node)) for key in ("name", "attr", "value"))
    return any(isinstance(name, str) and TOOLS.search(name) for name in names)
