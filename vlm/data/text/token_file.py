"""The token ids of a corpus in one file that is mapped into memory: a header that says what they are, then the ids.

Documents stand end to end, each as its begin, its ids and its end.
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

MAGIC = b"VLMTOKEN"
VERSION = 1  # of the format and of how documents are laid out
PREFIX = struct.Struct("<8sII")  # magic, version, bytes of JSON that follow
START = 4096  # where the ids begin: a page for the header keeps every dtype aligned


@dataclass(frozen=True)
class Header:
    """The header of a file of tokens.

    Args:
        tokenizer: Fingerprint of the tokenizer.
        dtype: Of an id, as NumPy writes it.
        tokens: Number of ids, the begin and end of each document included.
        documents, words, bytes: Of the text; words are parted by white space, bytes are those of UTF-8.
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
    """The token ids of a corpus, on disk until they are read.

    Args:
        path: A file that `write_tokens` wrote.
        tokenizer: Fingerprint of the tokenizer that it has to be written with.
    Attributes:
        header: What the file says of itself.
        tokens: All ids, mapped and not loaded.
    Raises:
        UserError: There is no such file, it is none of tokens, it is not whole, or another tokenizer wrote it.
    """

    def __init__(self, path: Path, tokenizer: str) -> None:
        self.path, self.header = path, _read_header(path)
        if self.header.tokenizer != tokenizer:
            raise UserError(f"{path}: was written with another tokenizer; remove the file, and it is written anew")
        self.tokens = np.memmap(path, np.dtype(self.header.dtype), "r", START, (self.header.tokens,))

    def __reduce__(self) -> Any:
        return TokenFile, (self.path, self.header.tokenizer)  # a pickled map would hold all ids


def open_tokens(path: Path, documents: Iterable[Lines], tokenizer: Tokenizer, *, size: int = 0) -> TokenFile:
    """The tokens in a file, which is first written where it is not there, not whole, or of another tokenizer.

    Of the processes that ask at once, one writes and the others wait for it.

    Args:
        path, documents, tokenizer, size: As `write_tokens` takes them.
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
    """Encodes documents into a file, which is there either whole or not at all.

    Args:
        path: The file.
        documents: The lines of each, with their line ends.
        tokenizer: Encodes each line.
        size: Bytes of the documents, about, for the progress bar; 0 where unknown.
        processes: How many processes encode; None for as many as the machine has processors.
    Raises:
        UserError: The file cannot be written, or the documents cannot be read.
    """
    try:
        with atomic_write(path) as file:
            _write(file, encode(documents, tokenizer, processes or os.cpu_count() or 1), tokenizer, size)
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
    damaged = UserError(f"{path}: is no whole file of tokens; remove the file, and it is written anew")
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
    """A bar on a terminal's stderr, nothing elsewhere; what it gives takes the bytes that were done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("encoding text"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=size or None)
        yield lambda done: bar.advance(task, done)
