"""Continuous batching: inputs join the running batch as soon as rows are free."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Condition, Thread
from typing import Any

from vlm.errors import UserError
from vlm.inference.predictor import Predictor
from vlm.serving.job import Job, Texts


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
