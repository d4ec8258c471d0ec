"""Encodes documents to token ids: begin, the ids of its lines, and end of each document.

It works line by line, so that the corpus is never in memory as a whole and several processes can share the work.
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

JOB = 2**19  # characters encoded per job
SERIAL = 16  # jobs; fewer are encoded in this process, because starting others takes longer

Lines = Iterable[str]


class Encoded(NamedTuple):
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


def encode(documents: Iterable[Lines], tokenizer: Tokenizer, processes: int) -> Iterator[Encoded]:
    """Encodes documents in order, in several processes if there is enough text.

    Args:
        documents: The lines of each document, which must not be empty.
        tokenizer: The tokenizer.
        processes: Maximum number of processes.
    """
    jobs = _jobs(documents)
    first = list(islice(jobs, SERIAL))
    jobs = chain(first, jobs)
    if processes == 1 or len(first) < SERIAL:
        yield from (_encode(tokenizer, job) for job in jobs)
        return
    # Spawned, because a fork of a process with torch's threads may hang.
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


def _encode(tokenizer: Tokenizer, job: list[Chunk]) -> Encoded:
    ids: list[int] = []
    words = size = 0
    for lines, before, ends in job:
        ids += [] if before else [tokenizer.bos_id]
        for line in lines:
            ids += tokenizer.encode(line)
        ids += [tokenizer.eos_id] if ends else []
        text = "".join(lines)
        begun = bool(before.strip() and text[:1].strip())  # the first word was counted in the previous chunk
        words += len(text.split()) - begun
        size += len(text.encode())
    return Encoded(np.array(ids, id_dtype(tokenizer)).tobytes(), sum(chunk.ends for chunk in job), words, size)


_tokenizer: list[Tokenizer] = []  # set in each process of the pool


def _start(state: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer[:] = [tokenizer_from_state(state)]


def _end_with_parent() -> None:
    """Ends this process when its parent is killed; otherwise it would wait for work forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(job: list[Chunk]) -> Encoded:
    return _encode(_tokenizer[0], job)
