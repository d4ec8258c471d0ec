"""Encodes documents into token ids: each becomes its begin, the ids of its lines and its end.

Line by line, so that no corpus is ever whole in memory and several processes can share the work.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from typing import Any, NamedTuple

import numpy as np

from vlm.data.text.tokenizer import Tokenizer, tokenizer_from_state

JOB = 2**19  # characters that are encoded in one go
SERIAL = 16  # jobs: to encode fewer takes less time than to start further processes

Lines = Iterable[str]


class Encoded(NamedTuple):
    """The ids of some text as bytes, and how much text it was."""

    ids: bytes
    documents: int
    words: int
    bytes: int


class Chunk(NamedTuple):
    """Lines of one document: the character before them, none where it begins, and whether it ends with them."""

    lines: list[str]
    before: str
    ends: bool


def encode(documents: Iterable[Lines], tokenizer: Tokenizer, processes: int) -> Iterator[Encoded]:
    """Encodes documents in order, by further processes where there is enough text.

    Args:
        documents: The lines of each, none of them empty.
        tokenizer: Encodes each line.
        processes: How many may encode at once.
    """
    jobs = _jobs(documents)
    first = list(islice(jobs, SERIAL))
    jobs = chain(first, jobs)
    if processes == 1 or len(first) < SERIAL:
        yield from (_encode(tokenizer, job) for job in jobs)
        return
    # Started afresh: a copy of a process in which torch has threads may hang.
    with ProcessPoolExecutor(processes, get_context("spawn"), _start, (tokenizer.state(),)) as pool:
        waiting: deque = deque()
        for job in jobs:
            waiting.append(pool.submit(_work, job))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest type that holds every id."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _jobs(documents: Iterable[Lines]) -> Iterator[list[Chunk]]:
    """Deals documents out in shares of about as much text, long ones in parts and short ones together."""
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


def _encode(tokenizer: Tokenizer, job: list[Chunk]) -> Encoded:
    ids: list[int] = []
    words = size = 0
    for lines, before, ends in job:
        ids += [] if before else [tokenizer.bos_id]
        for line in lines:
            ids += tokenizer.encode(line)
        ids += [tokenizer.eos_id] if ends else []
        text = "".join(lines)
        begun = bool(before.strip() and text[:1].strip())  # its first word was counted with what stands before
        words += len(text.split()) - begun
        size += len(text.encode())
    return Encoded(np.array(ids, id_dtype(tokenizer)).tobytes(), sum(chunk.ends for chunk in job), words, size)


_tokenizer: list[Tokenizer] = []  # of a process of the pool


def _start(state: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the process that started this one ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer[:] = [tokenizer_from_state(state)]


def _end_with_parent() -> None:
    """Ends this process when the one that started it was killed: for more work it would wait for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(job: list[Chunk]) -> Encoded:
    return _encode(_tokenizer[0], job)
