"""Parallel text files, such as texts and translations: line k of one corresponds to line k of the other."""

from pathlib import Path
from typing import ClassVar

from vlm.data.records import NAMES, Listed, Record, Skipped, Source, Split, refuse
from vlm.data.sources.tables import read_text
from vlm.data.text.lines import split_lines
from vlm.errors import UserError

Line = tuple[int, str, str]  # line number, text, translation


class AlignedFiles(Source):
    """Pairs of texts in two files per split, for example ``train.en`` and ``train.de``. Only a line feed ends a line.

    Args:
        root: Folder of the files.
        source: Suffix of the input files, such as ``en``.
        target: Suffix of the output files.
        train, val, test: File names of each split without suffix; None if the split does not exist.
    Raises:
        UserError: A file is missing, is not UTF-8, or has another number of lines than its counterpart.
    """

    holds: ClassVar[tuple[str, ...]] = ("text", "translation")
    name = "aligned files"

    def __init__(
        self,
        *,
        root: str,
        source: str,
        target: str,
        train: str = "train",
        val: str | None = "val",
        test: str | None = "test",
    ) -> None:
        if not Path(root).is_dir():
            raise UserError(f"data.root={root}: no such folder; set it to the folder of the two files")
        if source == target:
            raise UserError(f"data.from, data.to: both are {source!r}; give the suffixes of two files")
        self.skipped: list[str] = []
        stems = {"train": train, "val": val, "test": test}
        self._lines = {
            split: self._read(split, *(Path(root) / f"{stem}.{ending}" for ending in (source, target)))
            for split, stem in stems.items()
            if stem is not None
        }
        self._stems = stems
        self.splits = tuple(name for name in NAMES if name in self._lines)

    def open(self, name: str) -> Split:
        return Listed(self._lines[name], lambda line, epoch: self._record(name, line))

    def _record(self, split: str, line: Line) -> Record:
        number, text, translation = line
        return Record(f"{self._stems[split]}-{number}", {"text": text, "translation": translation})

    def _read(self, split: str, source: Path, target: Path) -> list[Line]:
        """Reads the pairs of two files, without those that have an empty side, which are listed in `skipped`."""
        for path in (source, target):
            if not path.is_file():
                absent = "" if split == "train" else f", or data.source.{split}=null if there is none"
                raise UserError(f"{path}: no such file; set data.root, data.source.{split} or the suffixes{absent}")
        texts, translations = read_lines(source), read_lines(target)
        if len(texts) != len(translations):
            longer, shorter = (source, target) if len(texts) > len(translations) else (target, source)
            fault = f"{longer}, line {min(len(texts), len(translations)) + 1}: {shorter.name} has no such line "
            fault += f"({len(texts):,} and {len(translations):,} lines); give files with corresponding lines"
            refuse(fault)
            self.skipped.append(Skipped(fault, "unequal files"))
        pairs = [(at, *pair) for at, pair in enumerate(zip(texts, translations, strict=False), start=1)]
        for number, *sides in pairs:
            empty = [f"{path}, line {number}" for path, text in zip((source, target), sides, strict=True) if not text]
            self.skipped += [Skipped(f"{line}: is empty; the pair is skipped", "empty text") for line in empty]
        whole = [(number, text, translation) for number, text, translation in pairs if text and translation]
        if not whole:
            raise UserError(f"{source}: has no text with a translation; give other files")
        return whole


def read_lines(path: Path) -> list[str]:
    """The lines of a file without surrounding spaces and tabs."""
    return [line.strip(" \t\r") for line in split_lines(read_text(path))]
