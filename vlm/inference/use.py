"""Runs a predictor for Python or for a file: prepares inputs ahead, and returns results in order."""

import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

from vlm.errors import UserError, print_error
from vlm.inference.inputs import default_workers, read_ahead
from vlm.inference.options import DecodingOptions, Options
from vlm.inference.predictor import Predictor, Watch
from vlm.inference.structured import GrammarOptions
from vlm.io.files import progress
from vlm.io.output import Record, Records


class Outcome(NamedTuple):
    """The outcome of an input.

    Args:
        source: As `Predictor.sources` returned it.
        value: As `Predictor.prepare` returned it.
        result: The result, or the `UserError` if the input failed.
        tree: The tree of its beam search, if trees are kept.
    """

    source: Any
    value: Any
    result: Any
    tree: list | None = None


# Takes an outcome; returns fields to add to each of its records.
Observer = Callable[[Outcome], Sequence[Record]]


class PredictionRunner:
    """Runs a predictor on inputs, which are prepared ahead of the model.

    Args:
        inputs: As `Arguments.read` or `Arguments.from_python` returned them.
        show_progress: Whether to show a progress bar.
    """

    def __init__(
        self, predictor: Predictor, inputs: Sequence[Any], options: Options, *, show_progress: bool = False
    ) -> None:
        self.predictor, self.options, self.show_progress = predictor, options, show_progress
        self.sources = predictor.sources(inputs, options)
        self._values: dict[int, Any] = {}  # prepared sources by place
        self._places: list[int] = []  # places of the sources that the model received
        self._faults: dict[int, UserError] = {}

    def prepack(self, *, more: bool = False) -> None:
        """Packs the model's weights for these inputs; `more` means that further inputs follow."""
        rows = min(self.options.batch_size, len(self.sources)) * self.predictor.width(self.options)
        self.predictor.prepack(rows, more=more or len(self.sources) > 1)

    def outcomes(self, *, watch: Watch | None = None, keep_trees: bool = False) -> Iterator[Outcome]:
        """Yields the outcome of each source, in order.

        Args:
            watch: As in `Predictor.results`, with places of sources.
            keep_trees: Whether to keep the trees of beam searches.
        """
        trees: dict[int, list] = {}
        options: dict[str, Any] = {"trees": trees} if keep_trees else {}
        if watch is not None:
            options["watch"] = lambda place, texts: watch(self._places[place], texts)
        waiting: dict[int, tuple[Any, list | None]] = {}
        next_place = 0
        for at, result in self.predictor.results(self._batches(), self.options, **options):
            waiting[self._places[at]] = result, trees.pop(at, None)
            while next_place in waiting or next_place in self._faults:
                yield self._outcome(next_place, *waiting.pop(next_place, (None, None)))
                next_place += 1
        for place in sorted({*waiting, *self._faults}):
            yield self._outcome(place, *waiting.pop(place, (None, None)))

    def _outcome(self, place: int, result: Any, tree: list | None) -> Outcome:
        return Outcome(self.sources[place], self._values.pop(place, None), self._faults.pop(place, result), tree)

    def _batches(self) -> Iterator[list[Any]]:
        batch, prepared = list[Any](), self._read()
        values = (
            progress(prepared, len(self.sources), f"{self.predictor.arguments.kind}s")
            if self.show_progress
            else prepared
        )
        try:
            for place, value in enumerate(values):
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
            prepared.close()

    def _read(self) -> Generator[Any, None, None]:
        workers = getattr(self.options, "workers", 0)
        workers = default_workers() if workers is None else workers
        ahead = 2 * self.options.batch_size
        return read_ahead(
            self.sources, lambda source: self.predictor.prepare(source, self.options), workers, ahead=ahead
        )


def predict_answers(
    predictor: Predictor, inputs: Sequence[Any], options: Options, *, prepack: bool | None = None
) -> list[Any]:
    """Returns the results of inputs for the Python API.

    Args:
        prepack: Whether to pack the weights for further calls too; None leaves them unpacked.
    Raises:
        UserError: An input cannot be read or used.
    """
    runner = PredictionRunner(predictor, inputs, options)
    if prepack is not None:
        runner.prepack(more=prepack)
    outcomes = []
    for outcome in runner.outcomes():
        if isinstance(outcome.result, UserError):
            raise outcome.result
        outcomes.append((outcome.source, outcome.result))
    results = [result for _, result in predictor.order_results(outcomes, options)]
    for line in _list_shortfalls(predictor, results, options):
        warnings.warn(line, stacklevel=4)
    return [predictor.answer(result, options) for result in results]


def write_results(
    predictor: Predictor,
    inputs: Sequence[Any],
    options: Options,
    records: Records,
    *,
    trees: dict[str, list | None] | None = None,
    observer: Observer | None = None,
) -> int:
    """Writes the records of inputs in order, as soon as they are ready; returns the exit status.

    A faulty input is named on stderr; the others still get their results. If all fail, the status is that of the first
    fault.

    Args:
        trees: Filled with the tree of each input's beam search, by the name of the input.
        observer: Called with each outcome before it is written.
    """
    runner = PredictionRunner(predictor, inputs, options, show_progress=not records.live)
    status, faults, results = _print_notes(predictor, runner.sources, options), list[UserError](), list[Any]()
    terminal = predictor.make_terminal_writer(runner.sources) if records.live else None
    extra_fields: Sequence[Record] = ()

    def successes() -> Iterator[tuple[Any, Any]]:
        nonlocal extra_fields
        for outcome in runner.outcomes(
            watch=None if terminal is None else terminal.watch, keep_trees=trees is not None
        ):
            if isinstance(outcome.result, UserError):
                print_error(outcome.result)
                faults.append(outcome.result)
                records.miss()
                continue
            extra_fields = () if observer is None else observer(outcome)
            if trees is not None:
                trees[predictor.name_of(outcome.source)] = outcome.tree
            yield outcome.source, outcome.result

    runner.prepack()
    for source, result in predictor.order_results(successes(), options):
        results.append(result)
        if terminal is not None:
            terminal.finish(result)
            continue
        for number, record in enumerate(predictor.record(source, result, options, form=records.form)):
            records.write({**record, **extra_fields[number]} if extra_fields else record)
    for line in _list_shortfalls(predictor, results, options):
        print(line, file=sys.stderr)
    return status if not faults else 1 if results else faults[0].status


def _print_notes(predictor: Predictor, sources: Sequence[Any], options: Options) -> int:
    """Prints the predictor's notes before the results; returns 1 if one is a fault."""
    status = 0
    for line in predictor.notes(sources, options):
        if isinstance(line, UserError):
            print_error(line)
            status = 1
        else:
            print(line, file=sys.stderr)
    return status


def _list_shortfalls(predictor: Predictor, results: Sequence[Any], options: Options) -> Iterator[str]:
    """Yields messages if inputs have fewer texts than requested, or texts do not match their grammar or have faults."""
    yield from predictor.shortfalls(results)
    if isinstance(options, DecodingOptions):
        counts = [count for result in results for count in predictor.counts(result)]
        fewer = sum(count < options.results for count in counts)
        few = f"{fewer} of {len(counts)} inputs" if len(counts) > 1 else "the input"
        if fewer:
            yield f"note: fewer texts than --results {options.results} for {few}; a larger --beam may find more"
    writer: Any = predictor
    if isinstance(options, GrammarOptions) and (grammar := writer.build_grammar(options)) is not None:
        skipped = {*grammar.vocabulary.ends, *writer.tokenizer.language_ids}
        texts = [[token for token in tokens if token not in skipped] for tokens in _list_tokens(results)]
        if cut := sum(not grammar.accepts(tokens) for tokens in texts):
            reason = f"end before they match {grammar.source.option}; a larger --max-tokens may help"
            yield f"note: {cut} of {len(texts)} texts {reason}"


def _list_tokens(results: Any) -> Iterator[Sequence[int]]:
    """Yields the tokens of each text of some results."""
    if isinstance(results, list):
        for result in results:
            yield from _list_tokens(result)
    elif results is not None:
        yield results.tokens
