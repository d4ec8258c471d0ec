"""The tree of a beam search, for people to look at."""

from collections.abc import Callable, Sequence
from typing import Any

from vlm.decoding.beam_row import Node


def as_json(tree: Sequence[Sequence[Node]], piece: Callable[[int], str]) -> dict[str, Any]:
    """A search as plain containers: every candidate that was looked at, step by step.

    Args:
        tree: The candidates of each step, as `decode` hands them out.
        piece: Printable form of a token.
    Returns:
        nodes, each with id, parent (its id, None for a first token), step, token, logprob (what the model gave it),
        total (of the whole hypothesis, by which it was ranked) and kept (whether it was finished or went on).
    """
    numbers: dict[int, int] = {}
    nodes: list[dict[str, Any]] = []
    for node in (node for step in tree for node in step):
        numbers[id(node)] = len(nodes)
        nodes.append(
            {
                "id": len(nodes),
                "parent": numbers.get(id(node.parent)),
                "step": node.depth,
                "token": piece(node.token),
                "logprob": node.logprob,
                "total": node.total,
                "kept": node.kept,
            }
        )
    return {"nodes": nodes}
