"""Texts from the command line, as rows that a text encoder reads."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from vlm.data.batch import InputRows
from vlm.data.text.documents import read_lines
from vlm.data.text.inputs import Encoded, Input, input_rows
from vlm.errors import UserError
from vlm.inference.options import refuse_undecoded


def read_texts(files: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Texts, and the lines of files, or of stdin where there are neither; only a line feed ends a line of a file.

    Raises:
        UserError: There is no text, a file cannot be read, or a text is not UTF-8.
    """
    lines = [line.rstrip("\r\n") for line in ([] if files or texts else sys.stdin)]
    for file in files:
        rows = "".join(read_lines(Path(file))).split("\n")
        lines += [line.rstrip("\r") for line in (rows if rows[-1] else rows[:-1])]
    lines = [*texts, *lines]
    if not lines:
        raise UserError("there is no text; give --text TEXT, a file, or a text a line on stdin")
    refuse_undecoded(lines)
    return lines


def note_cut(lengths: Iterable[int], room: int, *, names: str = "texts", part: str = "end") -> None:
    """Prints on stderr how many texts have more tokens than a model reads.

    Args:
        part: What the model does not read of these.
    """
    lengths = list(lengths)
    if cut := sum(length > room for length in lengths):
        line = f"note: {cut} of {len(lengths)} {names}: more than the {room} tokens that the model reads; the {part} of"
        print(line, "each was left out", file=sys.stderr)


def rows_of(samples: Sequence[Sequence[Input]], pad_id: int, device: torch.device | str) -> InputRows:
    """The rows of some samples, on a device."""
    return input_rows([Encoded(rows) for rows in samples], pad_id).to(device)
