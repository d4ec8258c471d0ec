"""Minimal pairs: a language model should find the right one of two similar sentences likelier.

As in BLiMP (Warstadt et al. 2020), the log-probabilities of whole sentences are compared.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vlm.data.sources.tables import read_cells
from vlm.errors import UserError, print_error
from vlm.evaluation.metrics.bootstrap import intervals

# Columns of a table; BLiMP's names are accepted too.
COLUMNS = {"good": "good|sentence_good", "bad": "bad|sentence_bad", "kind": "kind|UID"}


class Pair(NamedTuple):
    """Two sentences, and the kind of their difference."""

    good: str
    bad: str
    kind: str = ""


def read_pairs(path: Path) -> list[Pair]:
    """Reads the pairs of a table with the columns good, bad and, optionally, kind.

    Raises:
        UserError: The table cannot be read or is empty, or a sentence is missing, or both are equal.
    """
    pairs: list[Pair] = []
    notes: list[str] = []
    try:
        for cells in read_cells(path, COLUMNS, optional=["kind"], notes=notes):
            pair = Pair(*(str(cells.values.get(name) or "").strip() for name in COLUMNS))
            if not pair.good or not pair.bad or pair.good == pair.bad:
                raise UserError(f"{path}, {cells.where}: needs two sentences that differ, good and bad")
            pairs.append(pair)
    except UserError as fault:
        said, columns, _ = str(fault).partition("; set data.source.")
        raise UserError(f"{said}; name them good and bad" if columns else said) from fault
    for note in notes:
        print_error(note.partition("; data.source.")[0].partition("; if so, set data.source.")[0], "note")
    if not pairs:
        raise UserError(f"{path}: holds no pair; give a table with the columns good and bad")
    return pairs


def pair_scores(pairs: Sequence[Pair], margins: Sequence[float], *, seed: int = 0) -> dict[str, dict[str, float]]:
    """Returns the share of pairs whose good sentence is likelier, with its interval, overall and by kind.

    Args:
        margins: Log-probability of the good sentence minus that of the bad one, in nats; 0 counts as wrong.
    Returns:
        Scores named accuracy, accuracy@low, accuracy@high and pairs, by kind; those of all pairs under "".
    """
    right = np.array(margins) > 0
    kinds = np.array([pair.kind for pair in pairs])
    chosen = {"": np.ones(len(pairs), bool)} | {str(kind): kinds == kind for kind in dict.fromkeys(kinds) if kind}
    return {kind: _share(right[rows].astype(np.float64), seed) for kind, rows in chosen.items()}


def _share(right: np.ndarray, seed: int) -> dict[str, float]:
    bounds = intervals(["accuracy"], lambda draws: (draws @ right / len(right))[:, None], len(right), seed=seed)
    return {"accuracy": float(right.mean()), **bounds, "pairs": len(right)}
