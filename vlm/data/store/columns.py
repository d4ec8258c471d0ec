"""Columnar tables: Parquet and Arrow files, and folders of them in the layout of Hugging Face's `datasets`.

pyarrow, an optional dependency, is imported on demand. Arrow files are memory-mapped. Parquet files are decoded by
row groups, and the latest ones are cached.
"""

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm.data.records import SPLITS
from vlm.errors import UserError, printable
from vlm.io.files import require_pyarrow

if TYPE_CHECKING:
    import pyarrow

PARQUET, ARROW = (".parquet",), (".arrow", ".feather")
SUFFIXES = (*PARQUET, *ARROW)
SPLITS_FILE, STATE_FILE = "dataset_dict.json", "state.json"  # written by `save_to_disk`
CACHE_BYTES = 2**28  # maximum size of the cache of decoded row groups, per process
ROWS = 4096  # number of rows read at once
_WORD = re.compile(r"[a-zA-Z]+")


def is_columnar(path: Path) -> bool:
    """Returns True for a Parquet or Arrow file, or a folder of them."""
    if path.is_dir():
        return any((path / name).is_file() for name in (SPLITS_FILE, STATE_FILE)) or bool(_find_tables(path))
    return path.suffix.lower() in SUFFIXES


def find_column_files(path: Path) -> list[tuple[Path, str | None]]:
    """The files of a table with their splits, if their folders or names define them.

    Args:
        path: A file; a folder written by `save_to_disk`, of one split or all; or a folder of files named as on the hub,
            such as ``data/train-00000-of-00002.parquet``.
    Raises:
        UserError: The folder is damaged.
    """
    if not path.is_dir():
        return [(path, None)]
    if (path / SPLITS_FILE).is_file():
        names = _read_names(path / SPLITS_FILE, "splits")
        return [(file, name) for name in names for file in _saved_files(path / name)]
    if (path / STATE_FILE).is_file():
        return [(file, None) for file in _saved_files(path)]
    files = _find_tables(path)
    splits = []
    for file in files:
        matches = (_WORD.match(part) for part in file.relative_to(path).parts)
        words = (SPLITS.get(match[0].lower()) for match in matches if match)
        splits.append(next(filter(None, words), None))
    return list(zip(files, splits if all(splits) else [None] * len(files), strict=True))


def _find_tables(folder: Path) -> list[Path]:
    files = (file for pattern in ("*", "*/*", "*/*/*") for file in folder.glob(pattern))
    return sorted(file for file in files if file.suffix.lower() in SUFFIXES and file.name[0] != ".")


def _saved_files(folder: Path) -> list[Path]:
    """The files of one split written by `save_to_disk`, in order."""
    return [folder / name for name in _read_names(folder / STATE_FILE, "_data_files", "filename")]


def _read_names(path: Path, key: str, inner: str | None = None) -> list[str]:
    """Names of files or folders listed in a JSON file.

    Raises:
        UserError: The file cannot be read, or a name is not a plain file name.
    """
    try:
        names = json.loads(path.read_bytes())[key]
        names = names if inner is None else [entry[inner] for entry in names]
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(f"{key} has invalid names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as fault:
        raise UserError(f"{path}: is damaged ({type(fault).__name__}); save the data set again") from fault
    return names


@lru_cache(maxsize=256)
def open_columns(path: Path) -> "Columns":
    """The columns of a Parquet or Arrow file, opened once per process.

    Raises:
        UserError: The file cannot be read, or pyarrow is missing.
    """
    require_pyarrow(str(path))
    return (_Parquet if path.suffix.lower() in PARQUET else _Arrow)(path)


class Columns(ABC):
    """A columnar table.

    Args:
        path: The file.
    Attributes:
        schema: pyarrow's schema.
    Raises:
        UserError: The file is damaged.
    """

    schema: "pyarrow.Schema"

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._readable():
            self._open()

    @abstractmethod
    def _open(self) -> None:
        """Opens the file and sets `schema`."""

    @abstractmethod
    def _batches(self, names: Sequence[str]) -> Iterator["pyarrow.RecordBatch"]:
        """Validated batches of these columns, in order."""

    @abstractmethod
    def _value(self, name: str, row: int) -> Any:
        """The value of a column in a row."""

    @property
    def names(self) -> list[str]:
        return list(self.schema.names)

    @abstractmethod
    def _read_lists(self, name: str) -> "pyarrow.ChunkedArray":
        """Reads a column of lists, or one field of the structs in them, to count the items."""

    def counts(self, name: str) -> list[int] | None:
        """Number of images in each row of a column of image lists; None if each row has one image."""
        from pyarrow import compute, types

        kind = self.schema.field(name).type
        if not (types.is_list(kind) or types.is_large_list(kind)):
            return None
        with self._readable():
            return [count or 0 for count in compute.list_value_length(self._read_lists(name)).to_pylist()]

    def is_image(self, name: str) -> bool:
        """Returns True for a column of file contents, or lists of them, with or without file names."""
        from pyarrow import types

        kind = self.schema.field(name).type
        if types.is_list(kind) or types.is_large_list(kind):
            kind = kind.value_type
        if types.is_struct(kind):
            kind = next((field.type for field in kind if field.name == "bytes"), kind)
        return types.is_binary(kind) or types.is_large_binary(kind)

    def classes(self, name: str) -> list[str] | None:
        """Class names of a label column, from the metadata of `datasets`."""
        try:
            features = json.loads((self.schema.metadata or {})[b"huggingface"])["info"]["features"]
            names = features[name]["names"] if features[name]["_type"] == "ClassLabel" else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return [str(name) for name in names] if isinstance(names, list) else None

    def rows(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The rows of some columns; class labels are converted to names, and -1, which means unknown, to None.

        Raises:
            UserError: The file is damaged, or a label is not the number of a class.
        """
        classes = {name: class_names for name in names if (class_names := self.classes(name))}
        number = 0
        with self._readable():
            for batch in self._batches(list(dict.fromkeys(names))):
                for row in batch.to_pylist():
                    for name, class_names in classes.items():
                        row[name] = self._class_name(row[name], class_names, name, number)
                    yield row
                    number += 1

    def _class_name(self, label: int | None, classes: Sequence[str], column: str, row: int) -> str | None:
        if label is None or label == -1:
            return None
        if label not in range(len(classes)):
            raise UserError(
                f"{self.path}, row {row}: {column} {label!r} is not the number of one of its {len(classes)} classes; "
                "correct it, or save the data set again"
            )
        return classes[label]

    def cell(self, name: str, row: int) -> Any:
        """The value of a column in a row.

        Raises:
            UserError: The file is damaged.
        """
        with self._readable():
            return self._value(name, row)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Context that converts read errors to a UserError with the file's name."""
        from pyarrow import ArrowException

        try:
            yield
        except (ArrowException, OSError, ValueError, IndexError) as fault:  # pyarrow raises all of these
            reason = printable(next(iter(str(fault).splitlines()), type(fault).__name__))
            raise UserError(f"{self.path}: cannot be read ({reason:.150}); fetch or save it again") from fault


class _Arrow(Columns):
    """A memory-mapped Arrow file, in the stream format of `datasets` or the file format."""

    def _open(self) -> None:
        import pyarrow
        from pyarrow import ipc

        data = pyarrow.memory_map(str(self.path))
        indexed = data.read(6) == b"ARROW1"
        data.seek(0)
        self.table = (ipc.open_file if indexed else ipc.open_stream)(data).read_all()
        self.schema = self.table.schema
        self._validated: set[str] = set()

    def _check(self, names: Sequence[str]) -> None:
        """Validates columns on first use, because a damaged file may have arbitrary offsets."""
        self.table.select([name for name in names if name not in self._validated]).validate(full=True)
        self._validated |= set(names)

    def _batches(self, names: Sequence[str]) -> Iterator["pyarrow.RecordBatch"]:
        self._check(names)
        yield from self.table.select(names).to_batches(max_chunksize=ROWS)

    def _read_lists(self, name: str) -> "pyarrow.ChunkedArray":
        self._check([name])
        return self.table.column(name)

    def _value(self, name: str, row: int) -> Any:
        self._check([name])
        return self.table.column(name)[row].as_py()


class _Parquet(Columns):
    """A Parquet file."""

    def _open(self) -> None:
        from pyarrow import parquet

        self.file = parquet.ParquetFile(self.path, memory_map=True)
        self.schema = self.file.schema_arrow
        groups = range(self.file.metadata.num_row_groups)
        self._starts = list(accumulate((self.file.metadata.row_group(group).num_rows for group in groups), initial=0))

    def _batches(self, names: Sequence[str]) -> Iterator["pyarrow.RecordBatch"]:
        yield from self.file.iter_batches(batch_size=ROWS, columns=names, use_threads=False)

    def _read_lists(self, name: str) -> "pyarrow.ChunkedArray":
        paths = [self.file.schema.column(at).path for at in range(len(self.file.schema.names))]
        column_paths = [path for path in paths if path.startswith(f"{name}.")]
        column_paths.sort(key=lambda path: not path.endswith(".path"))  # file names are smaller than bytes
        return self.file.read(columns=column_paths[:1], use_threads=False).column(name)

    def _value(self, name: str, row: int) -> Any:
        group = bisect_right(self._starts, row) - 1
        if not 0 <= group < len(self._starts) - 1:
            raise IndexError(f"it has no row {row}")
        key = (self.path, name, group)
        decoded = _row_groups.pop(key, None)
        if decoded is None:
            decoded = self.file.read_row_group(group, columns=[name], use_threads=False).column(name)
        _row_groups[key] = decoded  # moved to the end: most recently used
        while len(_row_groups) > 1 and sum(group.nbytes for group in _row_groups.values()) > CACHE_BYTES:
            _row_groups.popitem(last=False)
        return decoded[row - self._starts[group]].as_py()


# Cached row groups, least recently used first.
_row_groups: OrderedDict[tuple[Path, str, int], "pyarrow.ChunkedArray"] = OrderedDict()
