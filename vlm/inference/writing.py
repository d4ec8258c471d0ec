"""Texts that a trained encoder-decoder writes of its inputs, whatever these are: what all such commands share."""

import json
import os
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp
from typing import Any, ClassVar

import torch

from vlm.data.text.tokenizer import Tokenizer, tokenizer_from_state
from vlm.decoding.constraints import Rules
from vlm.decoding.loop import Chunk, Watch, decode
from vlm.decoding.options import Decoding, Hypothesis, shortfall
from vlm.decoding.search import search
from vlm.decoding.trace import as_json
from vlm.errors import UserError
from vlm.inference.info import tokenizer_line
from vlm.inference.options import DecodingOptions, stored_options
from vlm.inference.predictor import Predictor
from vlm.inference.text.words import rules_of_words
from vlm.io.output import Output, Records
from vlm.models.context import Context
from vlm.models.encoder_decoder import EncoderDecoder
from vlm.nn.step.packed import prepack, prepack_for_decoding
from vlm.nn.step.replay import StepperPool


@dataclass
class Text:
    """A text that a model wrote.

    Args:
        logprob: Log-probability in nats.
        confidence: The geometric mean of its tokens' probabilities.
        tokens: Its tokens, prefix included and the end token not: read again, the text may give others.
    """

    text: str
    logprob: float
    confidence: float
    tokens: list[int] = field(default_factory=list)


# Is shown an input (its name, and as the model reads it) with its texts before they are written; returns what it has to
# add to the record of each.
Observer = Callable[[str, Any, Sequence[Text]], Sequence[dict[str, Any]]]


@torch.inference_mode()
def likeliest(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    context: Context,
    decoding: Decoding,
    *,
    pool: StepperPool | None = None,
    language: str | None = None,
) -> list[Text]:
    """The likeliest text of each encoded input; validation and evaluation decode through here.

    Args:
        pool: Recorded decode steps that batches of one evaluation share, on a GPU.
        language: As in `Tokenizer.begin`.
    """
    decoding = replace(decoding, rules=Rules(prefix=tuple(tokenizer.begin(language))))
    # Autocast would cast the weights anew for every token; and weights are evaluated as they are.
    with torch.autocast(context.states.device.type, enabled=False):
        bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
        results = search(model.decoder, context, decoding, bos_id=bos_id, eos_id=eos_id, pool=pool)
    return [_text(tokenizer, decoding, texts[0]) for texts in results]


def _text(tokenizer: Tokenizer, decoding: Decoding, hypothesis: Hypothesis) -> Text:
    logprob = sum(hypothesis.logprobs)
    tokens = _tokens(tokenizer, decoding, hypothesis.tokens)
    confidence = exp(logprob / max(1, len(hypothesis.logprobs)))
    return Text(tokenizer.decode(tokens), logprob, confidence, tokens)


def _tokens(tokenizer: Tokenizer, decoding: Decoding, tokens: Sequence[int]) -> list[int]:
    """The tokens of a text, of which its search has no prefix but an end token."""
    return [token for token in [*decoding.rules.prefix, *tokens] if token != tokenizer.eos_id]


class Writer(Predictor):
    """A trained encoder-decoder, ready to write; arguments as in Predictor.

    Attributes:
        names: The fields of a record that hold the input and the text.
        decoding: Options of decoding that the checkpoint comes with.
    """

    names: ClassVar[tuple[str, str]]
    model: EncoderDecoder

    def restore(self, about: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer_from_state(about["tokenizer"])
        self.max_tokens = int(about["max_tokens"])
        self.decoding = stored_options(about)

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield tokenizer_line(about["tokenizer"])

    @abstractmethod
    def encode(self, inputs: Sequence[Any]) -> Context:
        """The context of a batch of inputs."""

    @abstractmethod
    def keys(self, inputs: Sequence[Any]) -> Sequence[str]:
        """Keys of inputs by which texts of them are drawn: their content, wherever it is stored."""

    def rules(self, **options: Any) -> Rules:
        """Rules with words as people write them, as in `rules_of_words`."""
        return rules_of_words(self.tokenizer, **options)

    def usual(self) -> Decoding:
        """The search that the checkpoint comes with; the likeliest token at each step where it says nothing."""
        return self.searching(DecodingOptions())

    def searching(self, options: DecodingOptions, prefix: str = "", language: str | None = None) -> Decoding:
        """The search of some options; what they leave open is as the checkpoint comes with it.

        Args:
            prefix: Beginning of every text.
            language: As in `Tokenizer.begin`.
        Raises:
            UserError: The options ask for more tokens than a text has room for.
        """
        options.resolve(self.decoding)
        rules = options.rules(self.tokenizer, prefix=prefix, begin=self.tokenizer.begin(language))
        search = options.search(rules, sample=bool(options.sample))
        replace(search, max_tokens=search.max_tokens or self.max_tokens).longest_text(self.model.decoder.max_len)
        return search

    def written(self, batches: Iterable[Sequence[Any]], decoding: Decoding, *, rows: int) -> list[Any]:
        """The text of each input of a queue, or its texts, best first, where several are asked for.

        Args:
            batches: As in `stream`.
            rows: Inputs at a time.
        """
        results = list(self.stream(batches, decoding, rows=rows))
        if (line := shortfall(map(len, results), decoding)) is not None:
            warnings.warn(line, stacklevel=4)
        return results if decoding.results > 1 else [texts[0] if texts else None for texts in results]

    def prepack(self, rows: int, *, more: bool = True) -> None:
        if more or rows > 1:
            prepack(self.model.encoder)
            prepack_for_decoding(self.model.decoder, rows=rows)

    def write(self, inputs: Sequence[Any]) -> list[Text]:
        """The likeliest text of each input of a batch."""
        return likeliest(self.model, self.tokenizer, self.encode(inputs), Decoding(max_tokens=self.max_tokens))

    def stream(
        self, batches: Iterable[Sequence[Any]], decoding: Decoding, *, rows: int, trees: dict[int, Any] | None = None
    ) -> Iterator[list[Text]]:
        """The texts of each input of a queue, in its order, best first.

        Args:
            batches: Inputs as `encode` takes them; taken as there is room for more.
            rows: Inputs at a time.
            trees: As in `decode`.
        """
        waiting, turn = {}, 0
        for place, texts in self.ended(batches, decoding, rows=rows, trees=trees):
            waiting[place] = texts
            while turn in waiting:
                yield waiting.pop(turn)
                turn += 1

    def ended(
        self,
        batches: Iterable[Sequence[Any] | None],
        decoding: Decoding,
        *,
        rows: int,
        trees: dict[int, Any] | None = None,
        watch: Watch | None = None,
    ) -> Iterator[tuple[int, list[Text]]]:
        """The place of an input in a queue and its texts, best first, as soon as they are written.

        Args:
            batches: As in `stream`; None where no input waits now, as an empty chunk of `decode`.
            rows, trees: As in `stream`.
            watch: As in `decode`; it is shown tokens as `Text` has them.
        """
        if decoding.max_tokens is None:
            decoding = replace(decoding, max_tokens=self.max_tokens)
        shown = None if watch is None else partial(self._show, watch, decoding)
        for place, texts in decode(
            self.model.decoder,
            self._encoded(batches, decoding),
            decoding,
            bos_id=self.tokenizer.bos_id,
            eos_id=self.tokenizer.eos_id,
            rows=rows,
            device=self.device,
            trees=trees,
            watch=shown,
        ):
            yield place, [_text(self.tokenizer, decoding, text) for text in texts]

    def _show(self, watch: Watch, decoding: Decoding, place: int, texts: Sequence[Sequence[int]]) -> bool:
        return watch(place, [_tokens(self.tokenizer, decoding, text) for text in texts])

    def _encoded(self, batches: Iterable[Sequence[Any] | None], decoding: Decoding) -> Iterator[Chunk]:
        for batch in batches:
            if batch is None:
                yield (), None
            elif batch:
                keys = range(len(batch)) if decoding.sampling is None else self.keys(batch)
                yield keys, self.encode(batch)


def write_texts(
    writer: Writer,
    batches: Iterable[tuple[Sequence[str], Sequence[Any]]],
    records: Records,
    *,
    count: int,
    batch_size: int,
    decoding: Decoding,
    trees: dict[str, Any] | None = None,
    observer: Observer | None = None,
) -> None:
    """Writes a record for each text of a queue of inputs, as they come.

    Args:
        batches: Names of inputs, and the inputs as `Writer.encode` takes them.
        count: How many inputs there are, at most.
        batch_size: Inputs at a time; texts do not depend on it.
        trees: Takes the tree of each input's beam search, ready to be written as JSON.
        observer: Is shown each input with its texts before they are written.
    """
    names: list[str] = []
    shown: dict[int, Any] = {}

    def inputs() -> Iterator[Sequence[Any]]:
        for batch, values in batches:
            if observer is not None:
                shown.update(enumerate(values, start=len(names)))
            names.extend(batch)
            yield values

    counts: list[int] = []
    traces = None if trees is None else dict[int, Any]()
    writer.prepack(min(batch_size, count) * decoding.columns, more=count > 1)
    for place, texts in enumerate(writer.stream(inputs(), decoding, rows=batch_size, trees=traces)):
        added = [{}] * len(texts) if observer is None else observer(names[place], shown.pop(place), texts)
        for rank, (text, more) in enumerate(zip(texts, added, strict=True), start=1):
            records.write(_record(writer.names, names[place], rank if decoding.results > 1 else 0, text) | more)
        if trees is not None and traces is not None:
            trees[names[place]] = as_json(traces.pop(place), writer.tokenizer.piece)
        counts.append(len(texts))
    if (line := shortfall(counts, decoding)) is not None:
        print(line, file=sys.stderr)


def _record(names: tuple[str, str], name: str, rank: int, text: Text) -> dict[str, Any]:
    ranked = {"rank": rank} if rank else {}
    scores = {"logprob": text.logprob, "confidence": text.confidence}
    return {names[0]: name, **ranked, names[1]: text.text, **scores}


class Trace(Output):
    """The file of --trace, written with all trees at the end; arguments as in Output.

    Args:
        out: The file of --out.
    Raises:
        UserError: No beam is searched, or the file is that of --out.
    """

    def __init__(self, path: str | None, *, beam: int | None, inputs: Iterable[str], out: str | None) -> None:
        if path is not None and beam == 1:
            raise UserError("--trace writes the tree of a beam search; give --beam N, more than 1")
        if path is not None and out is not None and os.path.realpath(path) == os.path.realpath(out):
            raise UserError(f"--trace {path}: is the file of --out, too; choose another")
        super().__init__(path, option="--trace", inputs=inputs)
        self.trees: dict[str, Any] | None = None if path is None else {}

    def finish(self) -> None:
        """Writes the trees that there are."""
        if self.trees:
            self.write(json.dumps(self.trees, ensure_ascii=False))
