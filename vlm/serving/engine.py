"""A model that answers inputs as they come, together: each joins the running batch as rows fall free."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Condition, Thread
from typing import Any

from vlm.decoding.options import Decoding
from vlm.errors import UserError
from vlm.inference.predictor import Predictor
from vlm.inference.use import answers
from vlm.inference.writing import Writer
from vlm.serving.job import Job, Texts


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

    def submit(self, inputs: Sequence[Any], *, grown: Callable[[int, Texts], None] | None = None) -> list[Job]:
        """Jobs of some inputs, all of which are taken or none. One that is a UserError has that for its answer.

        Args:
            grown: As a job's, with the place of the input before the texts.
        Raises:
            Full: They do not fit into the queue.
        """
        jobs = [Job(one, grown=grown and partial(grown, place)) for place, one in enumerate(inputs)]
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
        """Cancels jobs: those that wait leave the queue, those that run give up their rows at the next token."""
        with self._changed:
            for job in jobs:
                job.leave()
                if job in self._waiting:
                    self._waiting.remove(job)

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
                if not taken:  # the fault came before any was taken: it would come again
                    taken |= enumerate(self._take(self.most))
                for job in taken.values():
                    job.answer.set_exception(fault)
            self.running = 0

    def _write(self, writer: Writer, search: Decoding, taken: dict[int, Job]) -> None:
        def watch(place: int, texts: Texts) -> bool:
            return taken[place].show(texts)

        for place, texts in writer.decoded(self._arrivals(taken), search, rows=self.rows, watch=watch):
            self.running -= 1
            job = taken.pop(place)
            job.note([text.tokens for text in texts])
            job.answer.set_result(texts if search.results > 1 else next(iter(texts), None))

    def _arrivals(self, taken: dict[int, Job]) -> Iterator[list[Any] | None]:
        """The inputs that wait whenever rows are free, or None.

        A batch has as many rows as it began with, and gives up free ones where none waits. Where more wait than run in
        fewer rows than there may be, none joins, until those that run are done and a larger batch begins.
        """
        place = width = 0
        while True:
            begins = self.running == 0
            grows = not begins and width < self.rows and self.waiting > self.running
            jobs = [] if grows else self._take(self.rows)
            if begins or not jobs:
                width = self.running
            taken |= enumerate(jobs, start=place)
            place += len(jobs)
            yield [job.content for job in jobs] or None

    def _use(self, taken: dict[int, Job]) -> None:
        taken |= enumerate(self._take(self.rows))
        inputs = [job.content for job in taken.values()]
        try:
            results = self._answers(inputs)
        except UserError:
            if len(inputs) == 1:
                raise
            for place in range(len(inputs)):  # one is at fault, and the others are not
                self._answer_alone(taken.pop(place))
            return
        for place, result in enumerate(results):
            taken.pop(place).answer.set_result(result)

    def _answers(self, inputs: list[Any]) -> list[Any]:
        return answers(self.predictor, inputs, self.predictor.options(batch_size=self.rows))

    def _answer_alone(self, job: Job) -> None:
        try:
            job.answer.set_result(self._answers([job.content])[0])
        except Exception as fault:
            job.answer.set_exception(fault)

    def _take(self, most: int) -> list[Job]:
        """Inputs that wait, but for those whose clients have gone."""
        with self._changed:
            jobs = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        jobs = [job for job in jobs if job.answer.set_running_or_notify_cancel()]
        self.running += len(jobs)
        return jobs
