"""Export of the beam search tree, for display."""

from collections.abc import Callable, Sequence
from typing import Any

from vlm.decoding.beam_row import Node


def as_json(tree: Sequence[Sequence[Node]], piece: Callable[[int], str]) -> dict[str, Any]:
    """The search as plain containers: all candidates, step by step.

    Args:
        tree: The candidates of each step, from `decode`.
        piece: Returns the printable form of a token.
    Returns:
        nodes, each with id, parent (its id, None for a first token), step, token, logprob (according to the model),
        total (score of the whole hypothesis) and kept (whether it was finished or continued).
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
