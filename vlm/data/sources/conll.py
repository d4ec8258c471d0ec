"""Tagged words in columns: one word per line, an empty line after each sentence (CoNLL, CoNLL-U)."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from vlm.data.sources.tables import read_text
from vlm.data.sources.text_source import FileOptions, Sample, TextSource
from vlm.errors import UserError

# https://universaldependencies.org/format.html
CONLL_U = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_NO_WORD = re.compile(r"\d+[-.]\d+")  # the ID of a multiword token or an empty node
DOCUMENT = "-DOCSTART-"  # first cell of a line between documents (CoNLL 2003)
_BLANKS = " \t\r"  # a no-break space does not end a sentence

Line = tuple[int, Sequence[str]]


class Conll(TextSource):
    """Words and tags in columns, given by number (from 1) or name.

    Ten columns are named as in CoNLL-U; others are named by a line ``# global.columns = ...``. If one is named ID,
    multiword tokens (``2-3``) and empty nodes (``8.1``) are ignored. Comments begin with ``#``; see `_is_comment`.
    Lines that begin with ``-DOCSTART-`` separate documents. A sentence with a missing word or tag is skipped.

    Args:
        word_column: Number or name of the column of words.
        tag_column: Number or name of the column of tags.
        delimiter: Separator of the columns; a space stands for one or more.
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
        lines = [(number, self._cells(line)) for number, line in enumerate(read_text(path).split("\n"), 1)]
        names: Sequence[str] = next((_column_names(cells) for _, cells in lines if _column_names(cells)), ())
        widths = Counter(len(cells) for _, cells in lines if cells and not cells[0].startswith("#"))
        width = widths.most_common(1)[0][0] if widths else 0
        if width == 1 and "\t" in self._delimiter and any(" " in cells[0].strip() for _, cells in lines if cells):
            mismatch = f"no line has a tab between columns, which data.source.delimiter={self._delimiter!r} expects"
            raise UserError(f"{path}: {mismatch}; for columns separated by spaces, set data.source.delimiter=' '")
        names = names or (CONLL_U if width == len(CONLL_U) else ())
        sentence: list[Line] = []
        for number, cells in (*lines, (0, [])):
            if not cells or cells[0].startswith(DOCUMENT):
                if sentence:
                    yield from self._sentence(path, sentence, names)
                sentence = []
            elif not (cells[0].startswith("#") and self._is_comment(cells, names, width, first=not sentence)):
                sentence.append((number, cells))

    def _cells(self, line: str) -> list[str]:
        """The cells of a line; none if it is blank."""
        line = line.rstrip("\r")
        if not line.strip(_BLANKS):
            return []
        return line.split(self._delimiter) if self._delimiter != " " else re.split(" +", line.strip(" "))

    def _is_comment(self, cells: Sequence[str], names: Sequence[str], width: int, *, first: bool) -> bool:
        """Returns True if a line that begins with # is a comment and not a word such as #photo.

        In a file with a column of IDs it always is. Elsewhere, only lines before the first word of a sentence are
        comments: those with fewer or more cells than words have, and those with blanks other than the delimiter.

        Args:
            cells: The cells of the line.
            names: Names of the columns.
            width: Number of cells of most words.
            first: Whether no word of the sentence precedes the line.
        """
        blank = "\t" if self._delimiter == " " else " "
        if "ID" in names or not first:
            return "ID" in names
        return len(cells) < 2 or width not in (0, len(cells)) or blank in (cells[0] if blank == " " else "".join(cells))

    def _sentence(self, path: Path, lines: Sequence[Line], names: Sequence[str]) -> Iterator[Sample]:
        words, tags = [], []
        for number, cells in lines:
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
            available = ", ".join(names) or f"{len(cells)} without names"
            raise UserError(
                f"{path}, line {number}: no column {column!r} among {available}; set data.source.{kind}_column to a "
                "number"
            )
        place = names.index(column) if isinstance(column, str) else column - 1
        return cells[place].strip() if 0 <= place < len(cells) else ""


def _column_names(cells: Sequence[str]) -> list[str]:
    """The names in a line ``# global.columns = ...``; empty for other lines."""
    line = " ".join(cells)
    return line.partition("=")[2].split() if line.startswith("# global.columns") else []
