"""Continuous batching: inputs join the running batch as soon as rows are free; answers are streamed."""

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread
from typing import Any, TypeAlias

from fastapi import HTTPException

from vlm.errors import UserError, printable
from vlm.inference.options import Options, without_input_parts
from vlm.inference.predictor import Predictor
from vlm.untrusted.sizes import JsonValue

# Seconds in which clients that were answered together usually send their next requests. Without it, the first of them
# would run alone, and the others after it.
NEXT_REQUESTS = 0.02
TokenSequences: TypeAlias = Sequence[Sequence[int]]  # the tokens of each text of an input, so far


@dataclass(frozen=True)
class JobAnswer:
    """The answer of a job that has ended, while others of its request may still run.

    Args:
        place: The index of its input.
    """

    place: int
    answer: Any


Update: TypeAlias = tuple[int, TokenSequences] | JobAnswer  # the tuple: of an input with new tokens, those so far
Updates: TypeAlias = asyncio.Queue[Update | None]  # of a request; None after the last
Results: TypeAlias = dict[str, list[JsonValue]]  # the content of a response


class Job:
    """An input that was accepted.

    Args:
        predictor: The model.
        content: The input as `Predictor.prepare` returned it, or the UserError that it raised, which is then the
            answer.
        options: Options of the request.
        on_tokens: Called on the engine's thread with the tokens of all texts whenever one has a new token.
        endpoint: The path of its request.
    Attributes:
        settings: The options without the input's parts; jobs with equal settings run together.
        answer: The future result.
        times: For each text, seconds from acceptance to each of its tokens.
        progress: Time of the last token by `time.monotonic`; before the first, that of acceptance.
    """

    def __init__(
        self,
        predictor: Predictor,
        content: Any,
        options: Options,
        *,
        on_tokens: Callable[[TokenSequences], None] | None = None,
        endpoint: str = "/predict",
    ) -> None:
        self.predictor, self.content, self.options, self.on_tokens = predictor, content, options, on_tokens
        self.endpoint = endpoint
        self.settings = without_input_parts(options)
        self.answer = Future[Any]()
        self.times: list[list[float]] = []
        self._start = self.progress = time.monotonic()
        self.is_cancelled = False  # its client has disconnected or timed out

    def cancel(self) -> None:
        """Cancels the job, because its client has disconnected or timed out."""
        self.is_cancelled = True
        self.answer.cancel()

    def count_cached_tokens(self) -> int:
        """Returns the number of tokens in the KV cache: those of prompts, states of images included, and of texts."""
        if isinstance(self.content, str):  # a prompt that is encoded with its batch
            prompts = len(self.predictor.tokenizer.encode(self.content)) if self.times else 0  # type: ignore[attr-defined]
        else:
            parts = self.content if isinstance(self.content, list) else [self.content]
            prompts = sum(len(getattr(part, "tokens", ())) for part in parts)
        return prompts + sum(map(len, self.times))

    def record_times(self, texts: TokenSequences) -> None:
        """Records the time of new tokens in the texts."""
        now = time.monotonic()
        self.times += [[] for _ in texts[len(self.times) :]]
        for times, tokens in zip(self.times, texts, strict=False):
            if len(tokens) > len(times):
                self.progress = now
                times += [round(now - self._start, 4)] * (len(tokens) - len(times))

    def report_tokens(self, texts: TokenSequences) -> bool:
        """Reports the tokens generated so far; returns False if the job is cancelled."""
        if texts and not self.is_cancelled:
            self.record_times(texts)
            if self.on_tokens is not None:
                self.on_tokens([list(tokens) for tokens in texts])  # copied, because the model may extend its lists
        return not self.is_cancelled


class QueueFullError(Exception):
    """The queue is full."""


class Engine:
    """A predictor on its own thread, with a queue of inputs.

    Inputs with equal settings run together; different predictors of the model have different settings. If the input
    that has waited longest has other settings than the running ones, no input joins these until they are done.

    Args:
        predictor: The model.
        rows: Usual number of texts, or other inputs, computed at the same time.
        max_queued: Maximum number of queued inputs.
    """

    def __init__(self, predictor: Predictor, *, rows: int, max_queued: int) -> None:
        self.predictor, self.max_queued = predictor, max_queued
        self.running = 0  # number of inputs that the model computes
        self._waiting: deque[Job] = deque()
        self._running_jobs: dict[int, Job] = {}
        self._changed = Condition()
        self._thread = Thread(target=self._serve, name="vlm serve", daemon=True)
        predictor.prepack(rows)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def list_waiting(self) -> list[Job]:
        """Returns the jobs in the queue."""
        with self._changed:
            return list(self._waiting)

    def list_running(self) -> list[Job]:
        """Returns the jobs that the model computes."""
        return list(self._running_jobs.values())

    def submit(
        self,
        inputs: Sequence[Any],
        options: Options,
        *,
        on_tokens: Callable[[int, TokenSequences], None] | None = None,
        predictor: Predictor | None = None,
        endpoint: str = "/predict",
    ) -> list[Job]:
        """Queues a job for each input; all of them or, if the queue is full, none.

        Args:
            inputs, options: As in `Job`.
            on_tokens: As in `Job`, but the first argument is the index of the input.
            predictor: Another predictor with the same model, for the options of another command.
            endpoint: As in `Job`.
        Raises:
            QueueFullError: The queue has less space than inputs.
        """
        target = self.predictor if predictor is None else predictor
        jobs = [
            Job(target, content, options, on_tokens=on_tokens and partial(on_tokens, place), endpoint=endpoint)
            for place, content in enumerate(inputs)
        ]
        for job in jobs:
            if isinstance(job.content, UserError):
                job.answer.set_exception(job.content)
        good = [job for job in jobs if not job.answer.done()]
        with self._changed:
            if len(self._waiting) + len(good) > self.max_queued:
                raise QueueFullError
            self._waiting += good
            self._changed.notify()
        return jobs

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancels jobs: waiting ones are removed from the queue, running ones free their rows at the next token."""
        with self._changed:
            for job in jobs:
                job.cancel()
                if job in self._waiting:
                    self._waiting.remove(job)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                predictor, settings = self._waiting[0].predictor, self._waiting[0].settings
            running = self._running_jobs = {}
            try:
                self._run(predictor, settings, running)
            except Exception as fault:  # only these inputs fail
                if not running:  # failed before any input ran, and would fail again
                    running |= enumerate(self._take_jobs(self.max_queued, settings))
                for job in running.values():
                    job.answer.set_exception(fault)
            self.running, self._running_jobs = 0, {}

    def _run(self, predictor: Predictor, settings: Options, running: dict[int, Job]) -> None:
        """Answers waiting inputs with equal settings, until none waits or one with other settings has waited longer.

        Args:
            running: Filled with the running jobs by index.
        """
        results = predictor.results(
            self._take_batches(settings, running),
            settings,
            watch=lambda place, texts: running[place].report_tokens(texts),
        )
        for place, result in results:
            self.running -= 1
            job = running.pop(place)
            if isinstance(result, list) and all(hasattr(item, "tokens") for item in result):
                job.record_times([item.tokens for item in result])
            job.answer.set_result(predictor.answer(result, job.options))
            if running and all(item.is_cancelled for item in running.values()):
                results.close()  # type: ignore[attr-defined]

    def _take_batches(self, settings: Options, running: dict[int, Job]) -> Iterator[list[Any] | None]:
        """Yields waiting inputs whenever rows are free, or None.

        A batch keeps its initial number of rows, and drops free rows when no input waits. If more inputs wait than run,
        and the batch has fewer rows than allowed, no input joins until the running ones are done; then a larger batch
        begins. A batch after one of several inputs waits briefly for as many.
        """
        place = width = 0
        while True:
            begins = self.running == 0
            if begins and width > 1:
                self._await_jobs(width)
            grows = not begins and width < settings.batch_size and self.waiting > self.running
            jobs = [] if grows else self._take_jobs(settings.batch_size, settings)
            if begins or not jobs:
                width = self.running
            running |= enumerate(jobs, start=place)
            place += len(jobs)
            yield [job.content for job in jobs] or None

    def _await_jobs(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.waiting >= count, NEXT_REQUESTS)

    def _take_jobs(self, limit: int, settings: Options) -> list[Job]:
        """Removes jobs with these settings from the queue; none if the first in the queue has other settings.

        Cancelled jobs are dropped.
        """
        jobs: list[Job] = []
        with self._changed:
            if self._waiting and self._waiting[0].settings == settings:
                alike = [job for job in self._waiting if job.settings == settings][:limit]
                for job in alike:
                    self._waiting.remove(job)
                jobs = [job for job in alike if job.answer.set_running_or_notify_cancel()]
        self.running += len(jobs)
        return jobs


def make_update_queue() -> tuple[Callable[[int, TokenSequences], None], Updates]:
    """Returns a queue for the updates of a request, and the `on_tokens` of `Engine.submit` that fills it."""
    loop, updates = asyncio.get_running_loop(), Updates()

    def put_from_thread(place: int, texts: TokenSequences) -> None:
        loop.call_soon_threadsafe(updates.put_nowait, (place, texts))

    return put_from_thread, updates


MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # prevents buffering by proxies
FAILED = "the model failed; its log says why"


async def stream_events(
    jobs: Sequence[Job],
    updates: Updates,
    results: Awaitable[Results],
    *,
    decode: Callable[[Sequence[int]], str],
) -> AsyncIterator[str]:
    """Yields the server-sent events of some jobs; cancels the results if closed early.

    Args:
        updates: The queue that `Engine.submit` of the jobs fills.
        results: Awaits the jobs' answers and returns the content of the last event.
        decode: Converts tokens to text.
    """
    sent_counts: Counter[tuple[int, int]] = Counter()
    try:
        async with aclosing(stream_updates(jobs, updates, results)) as steps:
            async for step in steps:
                if isinstance(step, JobAnswer):
                    continue
                if not isinstance(step, tuple):
                    yield _format_event("result", step)
                    continue
                place, texts = step
                for number, tokens in enumerate(texts):
                    for index in range(sent_counts[place, number], len(tokens)):
                        # The bytes of a character may span tokens.
                        text, seconds = decode(tokens[: index + 1]).rstrip("\ufffd"), jobs[place].times[number][index]
                        about: dict[str, JsonValue] = {"input": place, "result": number, "token": tokens[index]}
                        yield _format_event("token", about | {"text": text, "seconds": seconds})
                    sent_counts[place, number] = len(tokens)
    except Exception as fault:
        _, line = describe_failure(fault)
        yield _format_event("error", {"detail": printable(line)})


async def stream_updates(
    jobs: Sequence[Job], updates: Updates, results: Awaitable[Results]
) -> AsyncGenerator[Update | Results]:
    """Yields the new tokens and the answer of each job when it has them, then the results.

    Cancels the results if closed early. Arguments as in `stream_events`.
    """
    loop = asyncio.get_running_loop()

    def put_answer(place: int, answer: Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            loop.call_soon_threadsafe(updates.put_nowait, JobAnswer(place, answer.result()))

    for place, job in enumerate(jobs):
        job.answer.add_done_callback(partial(put_answer, place))
    task = asyncio.ensure_future(results)
    task.add_done_callback(lambda _: updates.put_nowait(None))
    try:
        while (update := await updates.get()) is not None:
            yield update
            await asyncio.sleep(0)  # other requests have their turn, however many updates wait
        yield task.result()
    finally:
        task.cancel()


def describe_failure(fault: Exception) -> tuple[int, str]:
    """Returns the HTTP status and message for a fault while an answer is streamed; logs a fault of the model."""
    if isinstance(fault, HTTPException):
        return fault.status_code, fault.detail
    if isinstance(fault, UserError):
        return 400, str(fault)
    logging.getLogger("uvicorn.error").error("%s", FAILED, exc_info=fault)
    return 500, FAILED


def _format_event(name: str, content: Mapping[str, JsonValue]) -> str:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n"
