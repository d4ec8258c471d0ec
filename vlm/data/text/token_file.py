"""Documents encoded to token ids, in a memory-mapped file."""

import json
import os
import signal
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vlm.data.store.storage import file_lock, unwritable_error
from vlm.data.text.tokenizer import Tokenizer, tokenizer_from_state
from vlm.errors import UserError
from vlm.io.files import atomic_write
from vlm.machine import cores

JOB = 2**19  # characters encoded per job
SERIAL = 16  # jobs; fewer are encoded in this process, because starting others takes longer

Lines = Iterable[str]


class EncodedTokens(NamedTuple):
    """Token ids of a text as bytes, and the amount of text."""

    ids: bytes
    documents: int
    words: int
    bytes: int


class Chunk(NamedTuple):
    """Lines of one document: the preceding character (empty at its beginning), and whether it ends with them."""

    lines: list[str]
    before: str
    ends: bool


def encode_documents(documents: Iterable[Lines], tokenizer: Tokenizer, processes: int) -> Iterator[EncodedTokens]:
    """Encodes documents in order, in several processes if there is enough text.

    Args:
        documents: The lines of each document, which must not be empty.
        tokenizer: The tokenizer.
        processes: Maximum number of processes.
    """
    jobs = _make_jobs(documents)
    first = list(islice(jobs, SERIAL))
    jobs = chain(first, jobs)
    if processes == 1 or len(first) < SERIAL:
        yield from (_encode_job(tokenizer, job) for job in jobs)
        return
    # Spawned, because a fork of a process with torch's threads may hang.
    with ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, (tokenizer.state(),)) as pool:
        waiting: deque = deque()
        for job in jobs:
            waiting.append(pool.submit(_run_job, job))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest type that holds every id."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _make_jobs(documents: Iterable[Lines]) -> Iterator[list[Chunk]]:
    """Divides documents into jobs of similar size: long ones are split, short ones combined."""
    job: list[Chunk] = []
    size = 0
    for document in documents:
        lines: list[str] = []
        before = ""
        for line in document:
            lines.append(line)
            size += len(line)
            if size >= JOB:
                yield [*job, Chunk(lines, before, False)]
                job, size, lines, before = [], 0, [], line[-1]
        job.append(Chunk(lines, before, True))
    if job:
        yield job


def _encode_job(tokenizer: Tokenizer, job: list[Chunk]) -> EncodedTokens:
    ids: list[int] = []
    words = size = 0
    for lines, before, ends in job:
        ids += [] if before else [tokenizer.bos_id]
        for line in lines:
            ids += tokenizer.encode(line)
        ids += [tokenizer.eos_id] if ends else []
        text = "".join(lines)
        continues = bool(before.strip() and text[:1].strip())  # its first word was counted with the previous chunk
        words += len(text.split()) - continues
        size += len(text.encode())
    return EncodedTokens(np.array(ids, id_dtype(tokenizer)).tobytes(), sum(chunk.ends for chunk in job), words, size)


_tokenizer: list[Tokenizer] = []  # set in each process of the pool


def _start_worker(state: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer[:] = [tokenizer_from_state(state)]


def _end_with_parent() -> None:
    """Ends this process when its parent is killed; otherwise it would wait for work forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_job(job: list[Chunk]) -> EncodedTokens:
    return _encode_job(_tokenizer[0], job)


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
            raise UserError(f"{path}: was written with another tokenizer; delete the file to create it again")
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
            _write(file, encode_documents(documents, tokenizer, processes or cores()), tokenizer, size)
    except OSError as error:
        raise unwritable_error(path, error) from error
    except BrokenProcessPool as error:
        raise UserError(f"{path}: a worker that encodes text was killed; free some memory and try again", 1) from error


def _write(file: BinaryIO, parts: Iterable[EncodedTokens], tokenizer: Tokenizer, size: int) -> None:
    dtype, digest = id_dtype(tokenizer), blake2b(digest_size=16)
    tokens = documents = words = count = 0
    file.seek(START)
    with _show_progress(size) as advance:
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
    damaged = UserError(f"{path}: is not a complete token file; delete it to create it again")
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
        raise UserError(f"{path}: {error.strerror}; give a token file") from error
    except (KeyError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise damaged from error
    return header


@contextmanager
def _show_progress(size: int) -> Iterator[Callable[[int], None]]:
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
