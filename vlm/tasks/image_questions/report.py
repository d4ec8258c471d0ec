"""The section of a report on questions about images: accuracy by kind, random answers and wrong ones."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlm.evaluation.report.sections import SHOWN, Card, Cards, Section, Table, random_places
from vlm.tasks.image_questions.metrics import is_right

CONTROL_NAMES = {"": "model", "@constant": "question alone", "@shuffled": "other image", "@blank": "blank image"}


def answer_sections(
    rows: Sequence[Mapping[str, Any]], scores: Mapping[str, float], kinds: Sequence[str]
) -> list[Section]:
    """Returns sections on the questions of an evaluation.

    Args:
        rows: The questions, from AnswerMetric.
        scores: Accuracies by name, including those of controls.
        kinds: Kinds of the questions.
    """
    controls = [control for control in CONTROL_NAMES if f"accuracy{control}" in scores]
    cells = [[kind, *(_share(scores.get(f"accuracy_{kind}{control}")) for control in controls)] for kind in kinds]
    table = Table(["kind of question", *(CONTROL_NAMES[control] for control in controls)], cells)
    sections = [Section("Kinds of question", [table])] if cells else []
    wrong = [row for row in rows if not is_right(row)]
    chosen = {
        "Random answers": [rows[at] for at in random_places(len(rows))],
        "Wrong answers": [wrong[at] for at in random_places(len(wrong))][:SHOWN],
    }
    return sections + [Section(title, [Cards(list(map(_card, some)))]) for title, some in chosen.items() if some]


def _share(score: float | None) -> str:
    return "" if score is None else f"{score:.1%}"


def _card(row: Mapping[str, Any]) -> Card:
    right = "right" if is_right(row) else f"right: {row['answer']}"
    before = " ".join(words for _, words in row.get("before", ()))
    text = f"{before} {row['question']} {row['predicted']}".strip()
    return Card(image=row["image_id"], text=text, lines=[right, row["image_id"]])
