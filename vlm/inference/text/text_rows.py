"""Encodes texts as rows, and reports truncated ones."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from vlm.data.batch import InputRows
from vlm.data.text.inputs import Encoded, Input, input_rows


def note_cut(lengths: Iterable[int], room: int, *, names: str = "texts", part: str = "end") -> Iterator[str]:
    """Yields a line on how many texts have more tokens than a model reads, if some do.

    Args:
        part: The part of these that the model does not read.
    """
    lengths = list(lengths)
    if cut := sum(length > room for length in lengths):
        line = f"note: {cut} of {len(lengths)} {names}: more than the {room} tokens that the model reads; the {part} of"
        yield f"{line} each was left out"


def encoded_rows(samples: Sequence[Sequence[Input]], pad_id: int, device: torch.device | str) -> InputRows:
    """The rows of some samples, on a device."""
    return input_rows([Encoded(rows) for rows in samples], pad_id).to(device)
