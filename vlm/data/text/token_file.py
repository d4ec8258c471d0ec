"""A memory-mapped file of the token ids of a corpus: a header, then the ids.

Documents are concatenated; each has a begin token, its ids and an end token.
"""

import json
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vlm.data.store.cache_file import file_lock, unwritable
from vlm.data.text.encoding import Encoded, Lines, encode, id_dtype
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import UserError
from vlm.io.atomic import atomic_write
from vlm.machine import cores

MAGIC = b"VLMTOKEN"
VERSION = 1  # of the format and the layout of documents
PREFIX = struct.Struct("<8sII")  # magic, version, number of bytes of JSON that follow
START = 4096  # offset of the ids; a page for the header keeps every dtype aligned


@dataclass(frozen=True)
class Header:
    """The header of a file of tokens.

    Args:
        tokenizer: Hash of the tokenizer.
        dtype: NumPy's name of the type of ids.
        tokens: Number of ids, with begin and end of each document.
        documents, words, bytes: Amount of text; words are separated by white space, bytes are UTF-8.
        digest: Hash of all ids.
    """

    tokenizer: str
    dtype: str
    tokens: int
    documents: int
    words: int
    bytes: int
    digest: str


class TokenFile:
    """Reads the token ids of a corpus on disk.

    Args:
        path: A file written by `write_tokens`.
        tokenizer: Expected hash of the tokenizer.
    Attributes:
        header: The file's header.
        tokens: All ids, memory-mapped.
    Raises:
        UserError: The file is missing, invalid or incomplete, or was written with another tokenizer.
    """

    def __init__(self, path: Path, tokenizer: str) -> None:
        self.path, self.header = path, _read_header(path)
        if self.header.tokenizer != tokenizer:
            raise UserError(f"{path}: was written with another tokenizer; delete the file, and it is created again")
        self.tokens = np.memmap(path, np.dtype(self.header.dtype), "r", START, (self.header.tokens,))

    def __reduce__(self) -> Any:
        return TokenFile, (self.path, self.header.tokenizer)  # pickling the map would copy all ids


def open_tokens(path: Path, documents: Iterable[Lines], tokenizer: Tokenizer, *, size: int = 0) -> TokenFile:
    """Opens a file of tokens; writes it first if it is missing, incomplete, or of another tokenizer.

    If several processes open it at once, one writes and the others wait.

    Args:
        path, documents, tokenizer, size: See `write_tokens`.
    """
    with suppress(UserError):
        return TokenFile(path, tokenizer.fingerprint)
    with file_lock(path):
        with suppress(UserError):
            return TokenFile(path, tokenizer.fingerprint)
        write_tokens(path, documents, tokenizer, size=size)
    return TokenFile(path, tokenizer.fingerprint)


def write_tokens(
    path: Path, documents: Iterable[Lines], tokenizer: Tokenizer, *, size: int = 0, processes: int | None = None
) -> None:
    """Encodes documents and writes them atomically.

    Args:
        path: The file.
        documents: The lines of each document, with line ends.
        tokenizer: The tokenizer.
        size: Approximate number of bytes, for the progress bar; 0 if unknown.
        processes: Number of processes; None for the number of CPUs available.
    Raises:
        UserError: The file cannot be written, or the documents cannot be read.
    """
    try:
        with atomic_write(path) as file:
            _write(file, encode(documents, tokenizer, processes or cores()), tokenizer, size)
    except OSError as error:
        raise unwritable(path, error) from error
    except BrokenProcessPool as error:
        raise UserError(f"{path}: a process that encoded text was killed; free some memory and try again", 1) from error


def _write(file: BinaryIO, parts: Iterable[Encoded], tokenizer: Tokenizer, size: int) -> None:
    dtype, digest = id_dtype(tokenizer), blake2b(digest_size=16)
    tokens = documents = words = count = 0
    file.seek(START)
    with _progress(size) as advance:
        for part in parts:
            file.write(part.ids)
            digest.update(part.ids)
            tokens += len(part.ids) // dtype.itemsize
            documents, words, count = documents + part.documents, words + part.words, count + part.bytes
            advance(part.bytes)
    header = Header(tokenizer.fingerprint, dtype.str, tokens, documents, words, count, digest.hexdigest())
    data = json.dumps(asdict(header)).encode()
    file.seek(0)
    file.write(PREFIX.pack(MAGIC, VERSION, len(data)) + data)


def _read_header(path: Path) -> Header:
    damaged = UserError(f"{path}: is not a complete file of tokens; delete it, and it is created again")
    try:
        with open(path, "rb") as file:
            magic, version, length = PREFIX.unpack(file.read(PREFIX.size))
            if (magic, version) != (MAGIC, VERSION) or length > START:
                raise damaged
            header = Header(**json.loads(file.read(length)))
            size = {"<u2": 2, "<u4": 4}[header.dtype]
            if os.fstat(file.fileno()).st_size != START + header.tokens * size:
                raise damaged
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file of tokens") from error
    except (KeyError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise damaged from error
    return header


@contextmanager
def _progress(size: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar if stderr is a terminal; yields a function that adds bytes done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("encoding text"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=size or None)
        yield lambda done: bar.advance(task, done)
