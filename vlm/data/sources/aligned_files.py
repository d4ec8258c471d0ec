"""Parallel text files: line k of one corresponds to line k of the others, which may name a photo."""

from functools import partial
from pathlib import Path
from typing import ClassVar

from vlm.data.images.image import SUFFIXES, load_image
from vlm.data.records import NAMES, ListSplit, Record, SkipMessage, Source, Split, report_error
from vlm.data.sources.tables import read_text
from vlm.data.text.words import split_lines
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
        return ListSplit(self._lines[name], lambda line, epoch: self._record(name, line))

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
            report_error(fault)
            self.skipped.append(SkipMessage(fault, "unequal files"))
        pairs = [(at, *pair) for at, pair in enumerate(zip(texts, translations, strict=False), start=1)]
        for number, *sides in pairs:
            empty = [f"{path}, line {number}" for path, text in zip((source, target), sides, strict=True) if not text]
            self.skipped += [SkipMessage(f"{line}: is empty; the pair is skipped", "empty text") for line in empty]
        complete = [(number, text, translation) for number, text, translation in pairs if text and translation]
        if not complete:
            raise UserError(f"{source}: has no text with a translation; give other files")
        return complete


def read_lines(path: Path) -> list[str]:
    """The lines of a file without surrounding spaces and tabs."""
    return [line.strip(" \t\r") for line in split_lines(read_text(path))]


class AlignedPhotos(AlignedFiles):
    """Pairs of texts like AlignedFiles, each with its photo; pairs with a missing photo are skipped.

    A photo is found by its file name, or by the part before an underscore: ``1000268201.jpg`` of Multi30k is
    ``1000268201_693b08cb0e.jpg`` of Flickr8k.

    Args:
        photos: Folder of the photos.
        names: Suffix of the files that name one photo per line.
        others: See AlignedFiles.
    Raises:
        UserError: As in AlignedFiles; a file of names is missing or has another length, or a split has no photo.
    """

    holds = ("image", "text", "translation")
    name = "aligned files with photos"

    def __init__(
        self,
        *,
        root: str,
        source: str,
        target: str,
        photos: str,
        names: str = "images.txt",
        train: str = "train",
        val: str | None = "val",
        test: str | None = "test",
    ) -> None:
        super().__init__(root=root, source=source, target=target, train=train, val=val, test=test)
        self._photos = _find_photos(Path(photos))
        self._names: dict[str, list[str]] = {}  # the photo of each line, by split
        for split, lines in self._lines.items():
            path = Path(root) / f"{self._stems[split]}.{names}"
            if not path.is_file():
                raise UserError(f"{path}: no such file; it names the photo of each line, see data.source.names")
            self._names[split] = read_lines(path)
            if (count := len(self._names[split])) < (last := lines[-1][0]):
                raise UserError(f"{path}: names {count:,} photos for {last:,} lines; give the matching file")
        for split, lines in self._lines.items():
            with_photo = [line for line in lines if self._photo_path(split, line) is not None]
            if not with_photo:
                raise UserError(f"data.photos={photos}: has no photo of {split}; give the folder of the photos")
            self._lines[split] = with_photo

    def _photo_path(self, split: str, line: Line) -> Path | None:
        name = Path(self._names[split][line[0] - 1])
        return self._photos.get(name.name) or self._photos.get(name.stem)

    def _record(self, split: str, line: Line) -> Record:
        record, path = super()._record(split, line), self._photo_path(split, line)
        assert path is not None, "lines without a photo are skipped"
        record.open_image, record.read_file = partial(load_image, str(path)), path.read_bytes
        record.read_stamp = lambda: f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"
        return record


def _find_photos(folder: Path) -> dict[str, Path]:
    """The photos of a folder by file name, and by the part before an underscore if it is unique.

    Raises:
        UserError: The folder does not exist.
    """
    if not folder.is_dir():
        raise UserError(f"data.photos={folder}: no such folder; set it to the folder of the photos")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    stems: dict[str, list[Path]] = {}
    for path in files:
        stems.setdefault(path.stem.partition("_")[0], []).append(path)
    short = {stem: paths[0] for stem, paths in stems.items() if len(paths) == 1}
    return short | {path.name: path for path in files}
