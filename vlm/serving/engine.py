"""Continuous batching: inputs join the running batch as soon as rows are free; answers are streamed."""

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from threading import Condition, Thread
from typing import Any

from fastapi import HTTPException

from vlm.errors import UserError, printable
from vlm.inference.options import settings
from vlm.inference.predictor import Predictor

Texts = Sequence[Sequence[int]]  # the tokens of each text of an input, so far


class Job:
    """An input that was accepted.

    Args:
        predictor: The model.
        content: The input as `Predictor.prepare` returned it, or the UserError that it raised, which is then the
            answer.
        options: Options of the request.
        grown: Called on the engine's thread with the texts, whenever one has a new token.
    Attributes:
        settings: The options without the input's parts; jobs with equal settings run together.
        answer: The future result.
        times: For each text, seconds from acceptance to each of its tokens.
        progress: Time of the last token by `time.monotonic`; before the first, that of acceptance.
    """

    def __init__(
        self, predictor: Predictor, content: Any, options: Any, *, grown: Callable[[Texts], None] | None = None
    ) -> None:
        self.predictor, self.content, self.options, self.grown = predictor, content, options, grown
        self.settings = settings(options)
        self.answer: Future = Future()
        self.times: list[list[float]] = []
        self._start = self.progress = time.monotonic()
        self.left = False  # no client waits for the answer any more

    def leave(self) -> None:
        """Cancels the job: no client waits for the answer any more."""
        self.left = True
        self.answer.cancel()

    def note(self, texts: Texts) -> None:
        """Records the time of new tokens in the texts."""
        now = time.monotonic()
        self.times += [[] for _ in texts[len(self.times) :]]
        for times, tokens in zip(self.times, texts, strict=False):
            if len(tokens) > len(times):
                self.progress = now
                times += [round(now - self._start, 4)] * (len(tokens) - len(times))

    def show(self, texts: Texts) -> bool:
        """Receives texts that may have grown; returns False if no client waits for them any more."""
        if texts and not self.left:
            self.note(texts)
            if self.grown is not None:
                self.grown([list(tokens) for tokens in texts])  # copied, because the model may extend its lists
        return not self.left


class Full(Exception):
    """The queue has no room for more inputs."""


class Engine:
    """A predictor on its own thread, with a queue of inputs.

    Inputs with equal settings run together; another use of the model has other settings. If the input that has waited
    longest has other settings than the running ones, none joins these until they are done.

    Args:
        predictor: The model.
        rows: Usual number of texts, or other inputs, computed at a time.
        most: Inputs that may wait.
    """

    def __init__(self, predictor: Predictor, *, rows: int, most: int) -> None:
        self.predictor, self.most = predictor, most
        self.running = 0  # inputs taken by the model and not yet answered
        self._waiting: deque[Job] = deque()
        self._changed = Condition()
        self._thread = Thread(target=self._serve, name="vlm serve", daemon=True)
        predictor.prepack(rows)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(
        self,
        inputs: Sequence[Any],
        options: Any,
        *,
        grown: Callable[[int, Texts], None] | None = None,
        predictor: Predictor | None = None,
    ) -> list[Job]:
        """Queues jobs for some inputs, either all of them or none.

        Args:
            inputs, options: As in `Job`.
            grown: As in `Job`, with the place of the input before the texts.
            predictor: Another use of the same model, with its own options.
        Raises:
            Full: The queue has no room for them.
        """
        used = self.predictor if predictor is None else predictor
        jobs = [Job(used, one, options, grown=grown and partial(grown, place)) for place, one in enumerate(inputs)]
        for job in jobs:
            if isinstance(job.content, UserError):
                job.answer.set_exception(job.content)
        good = [job for job in jobs if not job.answer.done()]
        with self._changed:
            if len(self._waiting) + len(good) > self.most:
                raise Full
            self._waiting += good
            self._changed.notify()
        return jobs

    def leave(self, jobs: Sequence[Job]) -> None:
        """Cancels jobs: waiting ones leave the queue, running ones free their rows at the next token."""
        with self._changed:
            for job in jobs:
                job.leave()
                if job in self._waiting:
                    self._waiting.remove(job)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                predictor, settings = self._waiting[0].predictor, self._waiting[0].settings
            taken: dict[int, Job] = {}
            try:
                self._run(predictor, settings, taken)
            except Exception as fault:  # only these inputs fail
                if not taken:  # failed before any input was taken, and would fail again
                    taken |= enumerate(self._take(self.most, settings))
                for job in taken.values():
                    job.answer.set_exception(fault)
            self.running = 0

    def _run(self, predictor: Predictor, settings: Any, taken: dict[int, Job]) -> None:
        """Answers waiting inputs with equal settings, until none waits or one with other settings has waited longer.

        Args:
            taken: Filled with the running jobs, by place.
        """

        def watch(place: int, texts: Texts) -> bool:
            return taken[place].show(texts)

        results = predictor.results(self._arrivals(settings, taken), settings, watch=watch)
        for place, result in results:
            self.running -= 1
            job = taken.pop(place)
            if isinstance(result, list) and all(hasattr(one, "tokens") for one in result):
                job.note([one.tokens for one in result])
            job.answer.set_result(predictor.answer(result, job.options))
            if taken and all(one.left for one in taken.values()):
                results.close()  # type: ignore[attr-defined]

    def _arrivals(self, settings: Any, taken: dict[int, Job]) -> Iterator[list[Any] | None]:
        """Yields waiting inputs whenever rows are free, or None.

        A batch keeps the rows it began with, and drops free ones when no input waits. If more inputs wait than run, and
        the batch has fewer rows than allowed, none joins until the running ones are done; then a larger batch begins.
        """
        place = width = 0
        while True:
            begins = self.running == 0
            grows = not begins and width < settings.batch_size and self.waiting > self.running
            jobs = [] if grows else self._take(settings.batch_size, settings)
            if begins or not jobs:
                width = self.running
            taken |= enumerate(jobs, start=place)
            place += len(jobs)
            yield [job.content for job in jobs] or None

    def _take(self, most: int, settings: Any) -> list[Job]:
        """Takes waiting inputs with equal settings, without cancelled ones; none if the first has other settings."""
        jobs: list[Job] = []
        with self._changed:
            if self._waiting and self._waiting[0].settings == settings:
                alike = [job for job in self._waiting if job.settings == settings][:most]
                for job in alike:
                    self._waiting.remove(job)
                jobs = [job for job in alike if job.answer.set_running_or_notify_cancel()]
        self.running += len(jobs)
        return jobs


MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # so that no proxy buffers events
FAILED = "the model failed; its log says why"


async def events(
    jobs: Sequence[Job],
    grown: asyncio.Queue[tuple[int, Texts] | None],
    results: Coroutine[Any, Any, Any],
    *,
    decode: Callable[[Sequence[int]], str],
) -> AsyncIterator[str]:
    """Yields the events of some jobs; cancels the results if closed early.

    Args:
        grown: Places of jobs whose texts have grown, with the texts.
        results: Awaits the jobs' answers and returns the content of the last event.
        decode: Converts tokens to text.
    """
    known: Counter[tuple[int, int]] = Counter()
    try:
        async with aclosing(growth(grown, results)) as steps:
            async for step in steps:
                if not isinstance(step, tuple):
                    yield _event("result", step)
                    continue
                place, texts = step
                for number, tokens in enumerate(texts):
                    for at in range(known[place, number], len(tokens)):
                        # The bytes of a character may span tokens.
                        text, seconds = decode(tokens[: at + 1]).rstrip("\ufffd"), jobs[place].times[number][at]
                        about = {"input": place, "result": number, "token": tokens[at], "text": text}
                        yield _event("token", about | {"seconds": seconds})
                    known[place, number] = len(tokens)
    except (UserError, HTTPException) as fault:
        line = fault.detail if isinstance(fault, HTTPException) else str(fault)
        yield _event("error", {"detail": printable(line)})
    except Exception as fault:
        logging.getLogger("uvicorn.error").error("%s", FAILED, exc_info=fault)
        yield _event("error", {"detail": FAILED})


async def growth(
    grown: asyncio.Queue[tuple[int, Texts] | None], results: Coroutine[Any, Any, Any]
) -> AsyncGenerator[tuple[int, Texts] | dict[str, Any]]:
    """Yields the items of `grown`, then the results; cancels these if closed early."""
    task = asyncio.ensure_future(results)
    task.add_done_callback(lambda _: grown.put_nowait(None))
    try:
        while (growing := await grown.get()) is not None:
            yield growing
        yield task.result()
    finally:
        task.cancel()


def _event(name: str, content: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n"
