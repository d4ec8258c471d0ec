"""The section of a report about answers that are parts of a passage."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlm.evaluation.report.sections import SHOWN, Section, Table, random_places

HEADER = ("question", "answer", "probability", "true answers")


def span_sections(rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Returns sections with random answers, and the most confident ones that share no word with a true one.

    Args:
        rows: Questions with their answers and scores.
    """
    wrong = sorted((row for row in rows if not row["f1"]), key=lambda row: -row["probability"])[:SHOWN]
    kinds = {"Random answers": [rows[at] for at in random_places(len(rows))], "Surest mistakes": wrong}
    return [Section(title, [Table(HEADER, list(map(_cells, chosen)))]) for title, chosen in kinds.items() if chosen]


def span_line(row: Mapping[str, Any]) -> str:
    """Returns an answer as a line to print."""
    question, predicted, _, true = _cells(row)
    return f"{'=' if row['exact_match'] else ' '} {question} {predicted}   true: {true}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    true = " | ".join(dict.fromkeys(row["answers"])) or "(none)"
    return [row["question"], row["predicted"] or "(none)", f"{row['probability']:.0%}", true]
