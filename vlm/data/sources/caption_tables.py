"""Readers of tables of captioned images, whose files or bytes the tables hold; one `Row` per caption."""

import os
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from vlm.data.images.image import SUFFIXES, ImageError, load_image, read_bytes
from vlm.data.records import SPLITS, RowChecker, RowError, SkipMessage
from vlm.data.sources.tables import decode_text, find_column, parse_split, read_json, read_text
from vlm.data.store.columns import SUFFIXES as TABLE_SUFFIXES
from vlm.data.store.columns import open_columns
from vlm.data.store.places import FileStore, Folder
from vlm.data.store.storage import get_file_stamp
from vlm.errors import UserError, excerpt
from vlm.untrusted.sizes import JsonValue


def parse_cell_name(name: str) -> tuple[str, int, int] | None:
    """Parses an image name FILE/ROW or FILE/ROW:PLACE into table, row and place in the row; None for a file's name."""
    table, _, cell = name.replace(os.sep, "/").rpartition("/")
    row, _, place = cell.partition(":")
    is_cell = table.lower().endswith(TABLE_SUFFIXES) and row.isdecimal() and (place or "0").isdecimal()
    return (table, int(row), int(place or 0)) if is_cell else None


def relative_to_root(path: str, root: Path) -> str:
    """Normalises an image name relative to a folder that contains it; FILE/ROW gets its table's absolute path."""
    path, root = os.path.normpath(path), root.absolute()
    if parse_cell_name(path) is not None:
        path = os.path.abspath(path)
    return os.path.relpath(path, root) if os.path.isabs(path) and Path(path).is_relative_to(root) else path


class FolderWithTables(Folder):
    """A folder whose columnar tables also contain images, named as `parse_cell_name` reads it.

    Args:
        path: The folder.
        column: Name of the image column, see `find_column`.
    """

    def __init__(self, path: Path, column: str) -> None:
        super().__init__(path)
        self.column = column

    def has(self, name: str) -> bool:
        cell = parse_cell_name(name)
        return super().has(name) if cell is None else super().has(cell[0])

    def names(self, folder: str) -> Collection[str]:
        return () if folder.lower().endswith(TABLE_SUFFIXES) else super().names(folder)

    def read(self, name: str) -> bytes:
        cell = parse_cell_name(name)
        return super().read(name) if cell is None else self._read_cell(*cell)

    def image(self, name: str) -> Image.Image:
        if parse_cell_name(name) is None:
            return super().image(name)
        return load_image(self.read(name), f"{self.path / name}")

    def stamp(self, name: str) -> str:
        cell = parse_cell_name(name)
        return (
            super().stamp(name) if cell is None else f"{get_file_stamp(str(self.path / cell[0]))} {cell[1]}:{cell[2]}"
        )

    def _read_cell(self, table: str, row: int, place: int) -> bytes:
        """The bytes of an image cell, of one of its images if it has several, or of the file that it names."""
        try:
            columns = open_columns(self.path / table)
            cell = columns.cell(find_column(self.column, columns.names) or self.column, row)
        except UserError as fault:
            raise ImageError(str(fault)) from fault
        if isinstance(cell, list):
            cell = cell[place] if place < len(cell) else None
        data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if data is not None:
            return data
        if path is not None:
            return read_bytes(self.path / path)
        raise ImageError(f"{self.path / table}/{row}: holds no image")


class Row(NamedTuple):
    """One caption: image name, text, split if the file has one, and position in the file.

    A caption is a text, or a Question, a Conversation or a Caption.
    """

    image: str
    caption: Hashable
    split: str | None
    position: str


def read_folder(place: FileStore, skipped: list[str]) -> list[Row]:
    """Rows of images that have a text file of the same name with one caption per line.

    Subfolders are included. If all images are in folders named like splits, those are the splits.

    Args:
        place: Storage of the files.
        skipped: Extended by a message for each image without captions and each text file without an image.
    """
    folders: dict[str, list[str]] = defaultdict(list)
    for path in place.files():
        folder, name = os.path.split(path)
        if not any(part.startswith(".") for part in path.split("/")):
            folders[folder].append(name)
    rows = [row for folder, names in folders.items() for row in _folder_rows(place, folder, sorted(names), skipped)]
    splits = [SPLITS.get(row.image.split("/")[0].lower()) if "/" in row.image else None for row in rows]
    return [row._replace(split=split) for row, split in zip(rows, splits, strict=True)] if all(splits) else rows


def _folder_rows(place: FileStore, folder: str, names: list[str], skipped: list[str]) -> Iterator[Row]:
    texts = {name[:-4]: name for name in names if name.lower().endswith(".txt")}
    unused = dict(texts)
    for name in names:
        stem, suffix = os.path.splitext(name)
        image = os.path.join(folder, name)
        if suffix.lower() not in SUFFIXES:
            continue
        if stem not in texts:
            skipped.append(SkipMessage(f"{place.path / image}: has no {stem}.txt", "no caption"))
            continue
        unused.pop(stem, None)
        where = os.path.join(folder, texts[stem])
        captions = decode_text(place.read(where), place.path / where).rstrip().split("\n")
        yield from (Row(image, caption, None, f"{where} line {n}") for n, caption in enumerate(captions, 1))
    skipped += [SkipMessage(f"{place.path / folder / name}: has no image", "no image") for name in unused.values()]


def read_flickr(checker: RowChecker, separator: str = "\t") -> Iterator[Row]:
    """Rows of ``Flickr8k.token.txt``: ``name.jpg#k``, a tab or another separator, and the caption.

    Raises:
        UserError: Too many lines have no separator or no number.
    """
    kind = "a tab" if separator == "\t" else "a space"

    def convert(line: tuple[str, str]) -> Iterator[Row]:
        where, text = line
        head, tab, caption = text.partition(separator)
        name, mark, _ = head.rpartition("#")
        if not tab or not mark:
            raise RowError(f"is not NAME#K, {kind} and a caption; restore the original file")
        yield Row(name, caption, None, where)

    numbered = enumerate(read_text(checker.path).split("\n"), 1)
    lines = ((f"line {number}", line.rstrip("\r")) for number, line in numbered if line.strip())
    return checker.read(((where, (where, text)) for where, text in lines), convert)


def read_coco(checker: RowChecker) -> list[Row]:
    """Rows of a COCO captions file (https://cocodataset.org/#format-data) or of Karpathy's ``dataset_coco.json``.

    The latter has splits, and its image names include the folder. Images without captions get an empty one.

    Raises:
        UserError: The file is neither, or too many of its entries are invalid.
    """
    path = checker.path
    content = read_json(path, "not a COCO captions file", "set data.path to one")
    images = list_entries(content, "images", path, "captions")
    if any(isinstance(image, dict) and "sentences" in image for image in images):
        numbered = ((f"image {number}", (f"image {number}", image)) for number, image in enumerate(images))
        return list(checker.read(numbered, _karpathy_rows))
    return _coco_rows(checker, images, list_entries(content, "annotations", path, "captions"))


def list_entries(content: JsonValue, name: str, path: Path, kind: str) -> list[JsonValue]:
    """The entries of a list of an annotation file of COCO.

    Args:
        content: The file's content.
        name: Key of the list.
        kind: Kind of the file, such as "captions", for messages.
    Raises:
        UserError: There is no such list.
    """
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a COCO {kind} file (no JSON object); set data.path to one")
    entries = content.get(name)
    if not isinstance(entries, list):
        raise UserError(f"{path}: has no list {name!r}, which COCO {kind} files have; is it the right file?")
    return entries


def _coco_rows(checker: RowChecker, images: list[JsonValue], annotations: list[JsonValue]) -> list[Row]:
    names: dict[Any, str] = {}
    captioned = set()
    for number, image in enumerate(images):
        try:
            names[entry_value(image, "id", int | float | str)] = entry_value(image, "file_name", str)
        except RowError as error:
            checker.reject(f"image {number}", error)

    def convert(annotation: Any) -> Iterator[Row]:
        image = entry_value(annotation, "image_id", int | float | str)
        captioned.add(image)
        caption = entry_value(annotation, "caption", str)
        yield Row(names.get(image, ""), caption, None, f"annotation {annotation.get('id')}")

    ids = (entry.get("id", number) if isinstance(entry, dict) else number for number, entry in enumerate(annotations))
    numbered = ((f"annotation {id}", annotation) for id, annotation in zip(ids, annotations, strict=True))
    rows = list(checker.read(numbered, convert))
    return rows + [Row(name, "", None, f"image {id}") for id, name in names.items() if id not in captioned]


def _karpathy_rows(numbered: tuple[str, Any]) -> Iterator[Row]:
    where, image = numbered
    name = entry_value(image, "filename", str)
    if image.get("filepath"):
        name = f"{entry_value(image, 'filepath', str)}/{name}"
    split = parse_split(entry_value(image, "split", str))
    captions = [entry_value(sentence, "raw", str) for sentence in entry_value(image, "sentences", list)] or [""]
    yield from (Row(name, caption, split, where) for caption in captions)


def entry_value(entry: JsonValue, name: str, kind: Any) -> Any:
    """The value of an entry's key; raises RowError if it is missing or of another type."""
    if not isinstance(entry, dict):
        raise RowError("not a JSON object")
    if not isinstance(entry.get(name), kind):
        detail = f"{name!r} is {excerpt(repr(entry[name]))}, which is of the wrong type" if name in entry else ""
        raise RowError(detail or f"has no {name!r}")
    return entry[name]
