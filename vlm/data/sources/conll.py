"""Tagged words in columns: one word per line, an empty line after each sentence (CoNLL, CoNLL-U)."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from vlm.data.sources.tables import read_text
from vlm.data.sources.text_source import FileOptions, Sample, TextSource
from vlm.errors import UserError

# https://universaldependencies.org/format.html
CONLL_U = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_NO_WORD = re.compile(r"\d+[-.]\d+")  # the ID of a multiword token or an empty node
_BLANKS = " \t\r"  # a no-break space does not end a sentence

Line = tuple[int, Sequence[str]]


class Conll(TextSource):
    """Words and tags in columns, given by number (from 1) or name.

    Ten columns are named as in CoNLL-U; others are named by a line ``# global.columns = ...``. If one is named ID,
    multiword tokens (``2-3``) and empty nodes (``8.1``) are ignored. A sentence with a missing word or tag is skipped.

    Args:
        word_column: Number or name of the column of words.
        tag_column: Number or name of the column of tags.
        delimiter: Separator of the columns.
        options: See `TextSource._read`.
    Raises:
        UserError: A file is missing or not UTF-8, or most of its sentences cannot be used.
    """

    holds = ("words", "tags")
    name = "tagged words"

    def __init__(
        self,
        *,
        word_column: int | str = 1,
        tag_column: int | str = 2,
        delimiter: str = "\t",
        **options: Unpack[FileOptions],
    ) -> None:
        self._columns = {"word": word_column, "tag": tag_column}
        self._delimiter = delimiter
        self._read(**options)

    def samples(self, path: Path) -> Iterator[Sample]:
        names: Sequence[str] = ()
        lines: list[Line] = []
        for number, line in enumerate((*read_text(path).split("\n"), ""), 1):
            cells = line.rstrip("\r").split(self._delimiter)
            if not line.strip(_BLANKS):
                if lines:
                    yield from self._sentence(path, lines, names)
                lines = []
            elif not lines and line.startswith("#") and len(cells) < 2:
                names = line.partition("=")[2].split() if line.startswith("# global.columns") else names
            else:
                lines.append((number, cells))

    def _sentence(self, path: Path, lines: Sequence[Line], named: Sequence[str]) -> Iterator[Sample]:
        words, tags = [], []
        for number, cells in lines:
            names = named or (CONLL_U if len(cells) == len(CONLL_U) else ())
            if "ID" in names and _NO_WORD.fullmatch(cells[names.index("ID")]):
                continue
            word, tag = (self._cell(path, number, cells, names, kind) for kind in ("word", "tag"))
            if not word or not tag:
                what = f"no {'tag' if word else 'word'}; the sentence is skipped"
                self._skip(path, f"line {number}", what, "no label" if word else "empty text")
                return
            words.append(word)
            tags.append(tag)
        if words:
            yield Sample(str(lines[0][0]), {"words": words, "tags": tags})

    def _cell(self, path: Path, number: int, cells: Sequence[str], names: Sequence[str], kind: str) -> str:
        """The word or tag of a line; empty if it is missing.

        Raises:
            UserError: The file does not have the column.
        """
        column = self._columns[kind]
        if isinstance(column, str) and column not in names:
            known = ", ".join(names) or f"{len(cells)} without names"
            raise UserError(
                f"{path}, line {number}: no column {column!r} among {known}; set data.source.{kind}_column to a number"
            )
        place = names.index(column) if isinstance(column, str) else column - 1
        return cells[place].strip() if 0 <= place < len(cells) else ""
