"""Parallel text files with a third file that names the photo of each line."""

from functools import partial
from pathlib import Path

from vlm.data.images.image import SUFFIXES, load_image
from vlm.data.records import Record
from vlm.data.sources.aligned_files import AlignedFiles, Line, read_lines
from vlm.errors import UserError


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
        self._photos = _known(Path(photos))
        self._names = {split: self._named(split, Path(root) / f"{self._stems[split]}.{names}") for split in self._lines}
        for split, lines in self._lines.items():
            there = [line for line in lines if self._path(split, line) is not None]
            if not there:
                raise UserError(f"data.photos={photos}: has no photo of {split}; give the folder of the photos")
            self._lines[split] = there

    def _named(self, split: str, path: Path) -> list[str]:
        """The photo of each line of a split."""
        if not path.is_file():
            raise UserError(f"{path}: no such file; it names the photo of each line, see data.source.names")
        names, last = read_lines(path), self._lines[split][-1][0]
        if len(names) < last:
            raise UserError(f"{path}: names {len(names):,} photos for {last:,} lines; give the matching file")
        return names

    def _path(self, split: str, line: Line) -> Path | None:
        name = Path(self._names[split][line[0] - 1])
        return self._photos.get(name.name) or self._photos.get(name.stem)

    def _record(self, split: str, line: Line) -> Record:
        record, path = super()._record(split, line), self._path(split, line)
        assert path is not None, "lines without a photo are skipped"
        record.open_image, record.read_file = partial(load_image, str(path)), path.read_bytes
        record.read_stamp = lambda: f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"
        return record


def _known(folder: Path) -> dict[str, Path]:
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
