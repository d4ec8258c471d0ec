"""Runs a predictor for Python or for a file: prepares inputs ahead, and returns results in order."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vlm.decoding.options import shortfall
from vlm.errors import UserError, print_error
from vlm.inference.inputs import default_workers, read_ahead
from vlm.inference.options import DecodingOptions
from vlm.inference.predictor import Predictor, Watch
from vlm.io.files import progress
from vlm.io.output import Records


class Outcome(NamedTuple):
    """The outcome of an input.

    Args:
        source: As `Predictor.sources` returned it.
        value: As `Predictor.prepare` returned it.
        result: The result, or the `UserError` if the input failed.
        tree: The tree of its beam search, if trees are asked for.
    """

    source: Any
    value: Any
    result: Any
    tree: Any = None


# Takes an outcome; returns fields to add to each of its records.
Observer = Callable[[Outcome], Sequence[Mapping[str, Any]]]


class Use:
    """One use of a model.

    Args:
        inputs: As `Arguments.read` or `Arguments.several` returned them.
        shown: Whether to show the progress.
    """

    def __init__(self, predictor: Predictor, inputs: Sequence[Any], options: Any, *, shown: bool = False) -> None:
        self.predictor, self.options, self.shown = predictor, options, shown
        self.sources = predictor.sources(inputs, options)
        self._values: dict[int, Any] = {}  # prepared sources by place
        self._places: list[int] = []  # places of the sources that the model got
        self._faults: dict[int, UserError] = {}

    def prepack(self, *, more: bool = False) -> None:
        """Packs the model's weights for these inputs; `more` says that others follow."""
        rows = min(self.options.batch_size, len(self.sources)) * self.predictor.width(self.options)
        self.predictor.prepack(rows, more=more or len(self.sources) > 1)

    def outcomes(self, *, watch: Watch | None = None, traced: bool = False) -> Iterator[Outcome]:
        """Yields the outcome of each source, in order.

        Args:
            watch: As in `Predictor.results`, with places of sources.
            traced: Whether to keep trees of beam searches.
        """
        trees: dict[int, Any] = {}
        more: dict[str, Any] = {"trees": trees} if traced else {}
        if watch is not None:
            more["watch"] = lambda place, texts: watch(self._places[place], texts)
        waiting: dict[int, tuple[Any, Any]] = {}
        turn = 0
        for at, result in self.predictor.results(self._batches(), self.options, **more):
            waiting[self._places[at]] = result, trees.pop(at, None)
            while turn in waiting or turn in self._faults:
                yield self._outcome(turn, *waiting.pop(turn, (None, None)))
                turn += 1
        for place in sorted({*waiting, *self._faults}):
            yield self._outcome(place, *waiting.pop(place, (None, None)))

    def _outcome(self, place: int, result: Any, tree: Any) -> Outcome:
        return Outcome(self.sources[place], self._values.pop(place, None), self._faults.pop(place, result), tree)

    def _batches(self) -> Iterator[list[Any]]:
        batch, read = list[Any](), self._read()
        counted = progress(read, len(self.sources), f"{self.predictor.arguments.kind}s") if self.shown else read
        try:
            for place, value in enumerate(counted):
                if isinstance(value, UserError):
                    self._faults[place] = value
                    continue
                self._values[place] = value
                self._places.append(place)
                batch.append(value)
                if len(batch) == self.options.batch_size:
                    yield batch
                    batch = []
            if batch:
                yield batch
        finally:
            read.close()

    def _read(self) -> Any:
        workers = getattr(self.options, "workers", 0)
        workers = default_workers() if workers is None else workers
        ahead = 2 * self.options.batch_size
        return read_ahead(self.sources, lambda one: self.predictor.prepare(one, self.options), workers, ahead=ahead)


def answers(predictor: Predictor, inputs: Sequence[Any], options: Any, *, prepack: bool | None = None) -> list[Any]:
    """The results of inputs for Python.

    Args:
        prepack: Whether to pack the weights for further calls too; None leaves them unpacked.
    Raises:
        UserError: An input cannot be read or used.
    """
    use = Use(predictor, inputs, options)
    if prepack is not None:
        use.prepack(more=prepack)
    found = []
    for outcome in use.outcomes():
        if isinstance(outcome.result, UserError):
            raise outcome.result
        found.append((outcome.source, outcome.result))
    results = [result for _, result in predictor.gathered(found, options)]
    if (line := _fewer(predictor, results, options)) is not None:
        warnings.warn(line, stacklevel=4)
    return [predictor.answer(result, options) for result in results]


def write_results(
    predictor: Predictor,
    inputs: Sequence[Any],
    options: Any,
    records: Records,
    *,
    trees: dict[str, Any] | None = None,
    observer: Observer | None = None,
) -> int:
    """Writes the records of inputs in order, as soon as they are ready; returns the exit status.

    A faulty input is named on stderr; the others still get their results. If all fail, the status is that of the first
    fault.

    Args:
        trees: Filled with the tree of each input's beam search, by the name of the input.
        observer: Called with each outcome before it is written.
    """
    use = Use(predictor, inputs, options, shown=not records.live)
    status, faults, results = _noted(predictor, use.sources, options), list[UserError](), list[Any]()
    typed = predictor.terminal(use.sources) if records.live else None
    added: Sequence[Mapping[str, Any]] = ()

    def good() -> Iterator[tuple[Any, Any]]:
        nonlocal added
        for outcome in use.outcomes(watch=None if typed is None else typed.watch, traced=trees is not None):
            if isinstance(outcome.result, UserError):
                print_error(outcome.result)
                faults.append(outcome.result)
                records.miss()
                continue
            added = () if observer is None else observer(outcome)
            if trees is not None:
                trees[predictor.name_of(outcome.source)] = outcome.tree
            yield outcome.source, outcome.result

    use.prepack()
    for source, result in predictor.gathered(good(), options):
        results.append(result)
        if typed is not None:
            typed.finish(result)
            continue
        for number, record in enumerate(predictor.record(source, result, options, form=records.form)):
            records.write({**record, **added[number]} if added else record)
    if (line := _fewer(predictor, results, options)) is not None:
        print(line, file=sys.stderr)
    return status if not faults else 1 if results else faults[0].status


def _noted(predictor: Predictor, sources: Sequence[Any], options: Any) -> int:
    """Prints the predictor's notes before the results; returns 1 if one is a fault."""
    status = 0
    for line in predictor.notes(sources, options):
        if isinstance(line, UserError):
            print_error(line)
            status = 1
        else:
            print(line, file=sys.stderr)
    return status


def _fewer(predictor: Predictor, results: Sequence[Any], options: Any) -> str | None:
    """Returns a message if inputs have fewer texts than requested."""
    if not isinstance(options, DecodingOptions):
        return None
    return shortfall((count for result in results for count in predictor.counts(result)), options.results)
