"""A model that answers inputs as they come, together: each joins the running batch as rows fall free."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any

from vlm.decoding.options import Decoding
from vlm.errors import UserError
from vlm.inference.predictor import Predictor
from vlm.inference.writing import Writer

Job = tuple[Any, Future]  # an input as the model takes it, and its answer to come


class Full(Exception):
    """More inputs wait than the queue holds."""


class Engine:
    """A predictor on a thread of its own, and the queue before it.

    Args:
        predictor: The model.
        search: The search of one that writes; None for others.
        rows: Inputs at a time.
        most: Inputs that may wait.
    """

    def __init__(self, predictor: Predictor, *, search: Decoding | None, rows: int, most: int) -> None:
        self.predictor, self.search, self.rows, self.most = predictor, search, rows, most
        self.running = 0  # inputs that the model has taken and not answered
        self._waiting: deque[Job] = deque()
        self._changed = Condition()
        self._thread = Thread(target=self._serve, name="vlm serve", daemon=True)
        predictor.prepack(rows * (1 if search is None else search.columns))
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, inputs: Sequence[Any]) -> list[Future]:
        """The answers to come of some inputs, all of which are taken or none.

        Raises:
            Full: They do not fit into the queue.
        """
        jobs: list[Job] = [(one, Future()) for one in inputs]
        with self._changed:
            if len(self._waiting) + len(jobs) > self.most:
                raise Full
            self._waiting += jobs
            self._changed.notify()
        return [answer for _, answer in jobs]

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
            taken: dict[int, Job] = {}
            try:
                if isinstance(self.predictor, Writer) and self.search is not None:
                    self._write(self.predictor, self.search, taken)
                else:
                    self._use(taken)
            except Exception as fault:  # of these inputs; others may do better
                for _, answer in taken.values():
                    answer.set_exception(fault)
            self.running = 0

    def _write(self, writer: Writer, search: Decoding, taken: dict[int, Job]) -> None:
        for place, texts in writer.ended(self._arrivals(taken), search, rows=self.rows):
            self.running -= 1
            taken.pop(place)[1].set_result(texts if search.results > 1 else next(iter(texts), None))

    def _arrivals(self, taken: dict[int, Job]) -> Iterator[list[Any] | None]:
        """The inputs that wait whenever rows are free, or None.

        A batch has as many rows as it began with, and gives up free ones where none waits. Where more wait than run in
        fewer rows than there may be, none joins, until those that run are done and a larger batch begins.
        """
        place = width = 0
        while True:
            begins = self.running == 0
            grows = not begins and width < self.rows and self.waiting > self.running
            jobs: list[Job] = [] if grows else self._take()
            if begins or not jobs:
                width = self.running
            taken |= enumerate(jobs, start=place)
            place += len(jobs)
            yield [one for one, _ in jobs] or None

    def _use(self, taken: dict[int, Job]) -> None:
        taken |= enumerate(self._take())
        inputs = [one for one, _ in taken.values()]
        try:
            results = self.predictor.use(inputs, batch_size=self.rows)
        except UserError:
            if len(inputs) == 1:
                raise
            for place, one in enumerate(inputs):  # one is at fault, and the others are not
                self._answer_alone(one, taken.pop(place)[1])
            return
        for place, result in enumerate(results):
            taken.pop(place)[1].set_result(result)

    def _answer_alone(self, one: Any, answer: Future) -> None:
        try:
            answer.set_result(self.predictor.use([one], batch_size=self.rows)[0])
        except Exception as fault:
            answer.set_exception(fault)

    def _take(self) -> list[Job]:
        """Inputs that wait, but for those whose clients have gone."""
        with self._changed:
            jobs = [self._waiting.popleft() for _ in range(min(self.rows, len(self._waiting)))]
        jobs = [job for job in jobs if job[1].set_running_or_notify_cancel()]
        self.running += len(jobs)
        return jobs
