"""Texts from the command line, as rows that a text encoder reads."""

import sys
from collections.abc import Sequence

import torch

from vlm.data.batch import InputRows
from vlm.data.text.inputs import Encoded, Input, input_rows
from vlm.errors import UserError
from vlm.inference.options import refuse_undecoded


def texts_or_lines(texts: Sequence[str] | None) -> list[str]:
    """The texts of an option, or else the lines of stdin.

    Raises:
        UserError: There is none, or one is no UTF-8.
    """
    found = list(texts) if texts else [line.rstrip("\r\n") for line in sys.stdin]
    if not found:
        raise UserError("there is no text; give --text TEXT, or a text a line on stdin")
    refuse_undecoded(found)
    return found


def rows_of(samples: Sequence[Sequence[Input]], pad_id: int, device: torch.device | str) -> InputRows:
    """The rows of some samples, on a device."""
    return input_rows([Encoded(rows) for rows in samples], pad_id).to(device)
