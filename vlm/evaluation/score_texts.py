"""`vlm score` for lines of text: BLEU, chrF, ROUGE, exact match and error rates, with intervals."""

import json
from pathlib import Path

from vlm.data.text.lines import split_lines
from vlm.errors import UserError
from vlm.evaluation.metrics.texts import NAMES, TextScores
from vlm.io.output import aligned, csv_text


def scored_texts(results: str, references: str, form: str) -> str:
    """Scores a file of texts, one per line, against a file with one reference per line.

    Args:
        form: "text", "json" or "csv".
    Raises:
        UserError: A file cannot be read or is empty, or they differ in their number of lines.
    """
    written, wanted = _lines(results), _lines(references)
    if len(written) != len(wanted):
        raise UserError(f"{results}: has {len(written):,} lines, and {references} {len(wanted):,}; give a text a line")
    scores = TextScores(written, wanted)
    summary, bounds = scores.summary, scores.intervals(seed=0)
    if form == "json":
        return (
            json.dumps({**summary, **bounds, "texts": len(written), "signatures": scores.signatures()}, indent=1) + "\n"
        )
    if form == "csv":
        return csv_text([NAMES, [summary[name] for name in NAMES]])
    columns = [[summary[name], bounds[f"{name}@low"], bounds[f"{name}@high"]] for name in NAMES]
    rows = [[name, *(f"{value:.4f}" for value in row)] for name, row in zip(NAMES, columns, strict=True)]
    signatures = "\n".join(f"{name:<6}{signature}" for name, signature in scores.signatures().items())
    return f"{len(written):,} texts\n{aligned([['', 'score', 'low', 'high'], *rows])}\n\n{signatures}\n"


def _lines(path: str) -> list[str]:
    try:
        lines = split_lines(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as fault:
        raise UserError(f"{path}: {fault.strerror}; give a readable file") from fault
    except UnicodeDecodeError as fault:
        raise UserError(f"{path}: is not UTF-8; save it as UTF-8") from fault
    if lines in ([], [""]):
        raise UserError(f"{path}: is empty; give a text a line")
    return lines
