"""Images stored inside columnar tables instead of files."""

import os
from collections.abc import Collection
from pathlib import Path

from PIL import Image

from vlm.data.images.image import ImageError, load_image, read_bytes
from vlm.data.sources.tables import find_column
from vlm.data.store.columns import SUFFIXES as TABLE_SUFFIXES
from vlm.data.store.columns import open_columns
from vlm.data.store.places import Folder
from vlm.data.store.storage import stamp
from vlm.errors import UserError


def table_of(name: str) -> tuple[str, int, int] | None:
    """Parses an image name FILE/ROW or FILE/ROW:PLACE into table, row and place in the row; None for a file's name."""
    table, _, cell = name.replace(os.sep, "/").rpartition("/")
    row, _, place = cell.partition(":")
    known = table.lower().endswith(TABLE_SUFFIXES) and row.isdecimal() and (place or "0").isdecimal()
    return (table, int(row), int(place or 0)) if known else None


def within(path: str, root: Path) -> str:
    """Normalises an image name relative to a folder that contains it; FILE/ROW gets its table's absolute path."""
    path, root = os.path.normpath(path), root.absolute()
    if table_of(path) is not None:
        path = os.path.abspath(path)
    return os.path.relpath(path, root) if os.path.isabs(path) and Path(path).is_relative_to(root) else path


class FolderWithTables(Folder):
    """A folder whose columnar tables also contain images, named as `table_of` reads it.

    Args:
        path: The folder.
        column: Name of the image column, see `find_column`.
    """

    def __init__(self, path: Path, column: str) -> None:
        super().__init__(path)
        self.column = column

    def has(self, name: str) -> bool:
        inside = table_of(name)
        return super().has(name) if inside is None else super().has(inside[0])

    def names(self, folder: str) -> Collection[str]:
        return () if folder.lower().endswith(TABLE_SUFFIXES) else super().names(folder)

    def read(self, name: str) -> bytes:
        inside = table_of(name)
        return super().read(name) if inside is None else self._content(*inside)

    def image(self, name: str) -> Image.Image:
        if table_of(name) is None:
            return super().image(name)
        return load_image(self.read(name), f"{self.path / name}")

    def stamp(self, name: str) -> str:
        inside = table_of(name)
        return super().stamp(name) if inside is None else f"{stamp(str(self.path / inside[0]))} {inside[1]}:{inside[2]}"

    def _content(self, table: str, row: int, place: int) -> bytes:
        """The bytes of an image cell, of one of its images if it has several, or of the file that it names."""
        try:
            columns = open_columns(self.path / table)
            cell = columns.cell(find_column(self.column, columns.names) or self.column, row)
        except UserError as fault:
            raise ImageError(str(fault)) from fault
        if isinstance(cell, list):
            cell = cell[place] if place < len(cell) else None
        data, beside = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if data is not None:
            return data
        if beside is not None:
            return read_bytes(self.path / beside)
        raise ImageError(f"{self.path / table}/{row}: holds no image")
