"""Text generation by encoder-decoders, shared by their tasks, and the words of generated texts."""

import json
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import torch

from vlm.checkpoint.stored import DecodingDefaults
from vlm.data.text.tokenizer import Tokenizer
from vlm.data.text.words import spaceless_pattern
from vlm.decoding.beam_row import as_json
from vlm.decoding.grammar import Grammar
from vlm.decoding.loop import Chunk, decode, decode_batch
from vlm.decoding.options import Decoding, Hypothesis
from vlm.errors import UserError
from vlm.inference.options import (
    MANY_TEXTS,
    DecodingOptions,
    WritingOptions,
    check_stored_decoding,
)
from vlm.inference.predictor import Rows, Stored, TextPredictor, Watch
from vlm.inference.structured import GrammarOptions
from vlm.io.output import Output
from vlm.models.context import Context
from vlm.models.encoder_decoder import EncoderDecoder
from vlm.nn.step.packed import prepack, prepack_for_decoding
from vlm.nn.step.replay import StepperPool

Item = TypeVar("Item")


@dataclass
class Text:
    """A generated text.

    Args:
        text: The text, with the prefix.
        logprob: Log-probability in nats.
        confidence: The geometric mean of its tokens' probabilities.
        tokens: The generated ids, with the prefix and without the end token. Encoding the text again may give other
            ids.
    """

    text: str
    logprob: float
    confidence: float
    tokens: list[int] = field(default_factory=list)


@torch.inference_mode()
def decode_likeliest(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    context: Context,
    decoding: Decoding,
    *,
    pool: StepperPool | None = None,
    language: str | None = None,
) -> list[Text]:
    """Decodes the likeliest text of each encoded input; also used by validation and evaluation.

    Args:
        pool: Recorded decode steps on a GPU, shared by the batches of an evaluation.
        language: As in `Tokenizer.begin`.
    """
    decoding = replace(decoding, rules=replace(decoding.rules, prefix=tuple(tokenizer.begin(language))))
    # Autocast would cast the weights again for every token; and evaluation uses the weights as they are.
    with torch.autocast(context.states.device.type, enabled=False):
        bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
        results = decode_batch(model.decoder, context, decoding, bos_id=bos_id, eos_id=eos_id, pool=pool)
    return [_text(tokenizer, decoding, texts[0]) for texts in results]


def _text(tokenizer: Tokenizer, decoding: Decoding, hypothesis: Hypothesis) -> Text:
    logprob = sum(hypothesis.logprobs)
    tokens = _tokens(tokenizer, decoding, hypothesis.tokens)
    confidence = exp(logprob / max(1, len(hypothesis.logprobs)))
    return Text(tokenizer.decode(tokens), logprob, confidence, tokens)


def _tokens(tokenizer: Tokenizer, decoding: Decoding, tokens: Sequence[int]) -> list[int]:
    """Returns the tokens of a text: those of the search with the prefix added and the end token removed."""
    return [token for token in [*decoding.rules.prefix, *tokens] if token != tokenizer.eos_id]


class Writer(TextPredictor):
    """A trained encoder-decoder that generates text; arguments as in Predictor.

    Attributes:
        names: The fields of a record that hold the input and the text.
        decoding: The checkpoint's decoding options.
    """

    names: ClassVar[tuple[str, str]]
    options: ClassVar[Any] = WritingOptions
    stored: ClassVar[Stored] = {"max_tokens": int, "decoding": check_stored_decoding}
    max_tokens: int
    decoding: DecodingDefaults = DecodingDefaults()
    model: EncoderDecoder

    @abstractmethod
    def encode(self, inputs: Sequence[Any]) -> Context:
        """Encodes a batch of prepared sources."""

    @abstractmethod
    def keys(self, inputs: Sequence[Any]) -> Sequence[str]:
        """Returns keys of prepared sources for sampling, which depend only on their content."""

    def build_decoding(self, options: WritingOptions) -> Decoding:
        """Returns the search for some options; unset ones come from the checkpoint.

        Raises:
            UserError: The options request more tokens than the decoder has positions.
        """
        chosen = options.resolve(self.decoding)
        language = getattr(options, "language", None)
        rules = chosen.build_rules(self.tokenizer, begin=self.tokenizer.begin(language))
        rules = replace(rules, grammar=self.build_grammar(options))
        search = chosen.build_decoding(rules, sample=bool(chosen.sample))
        replace(search, max_tokens=search.max_tokens or self.max_tokens).longest_text(self.model.decoder.max_len)
        return search

    def build_grammar(self, options: WritingOptions) -> Grammar | None:
        """Returns what texts match, if anything."""
        if not isinstance(options, GrammarOptions):
            return None
        return options.build_grammar(self.tokenizer, (self.tokenizer.eos_id, *self.decoding.get("ends", ())))

    def check_options(self, options: WritingOptions) -> None:
        self.build_decoding(options)

    def results(
        self,
        batches: Iterable[Sequence[Any] | None],
        options: WritingOptions,
        *,
        watch: Watch | None = None,
        trees: dict[int, list] | None = None,
    ) -> Iterator[tuple[int, list[Text]]]:
        """Yields the texts of inputs, best first, with continuous batching. See `Predictor.results`.

        Args:
            trees: Filled with the tree of each input's beam search, by its place.
        """
        decoding = self.build_decoding(options)
        return self.decode_batches(batches, decoding, rows=options.batch_size, watch=watch, trees=trees)

    def decode_batches(
        self,
        batches: Iterable[Sequence[Any] | None],
        decoding: Decoding,
        *,
        rows: int,
        watch: Watch | None = None,
        trees: dict[int, list] | None = None,
    ) -> Iterator[tuple[int, list[Text]]]:
        """Yields the texts that a search finds, as `results` does.

        Args:
            rows: Number of inputs decoded at the same time.
        """
        if decoding.max_tokens is None:
            decoding = replace(decoding, max_tokens=self.max_tokens)

        def report(place: int, texts: Sequence[Sequence[int]]) -> bool:
            assert watch is not None
            return watch(place, [_tokens(self.tokenizer, decoding, text) for text in texts])

        for place, texts in decode(
            self.model.decoder,
            self._encode_batches(batches, decoding),
            decoding,
            bos_id=self.tokenizer.bos_id,
            eos_id=self.tokenizer.eos_id,
            rows=rows,
            device=self.device,
            trees=trees,
            watch=None if watch is None else report,
        ):
            yield place, [_text(self.tokenizer, decoding, text) for text in texts]

    def _encode_batches(self, batches: Iterable[Sequence[Any] | None], decoding: Decoding) -> Iterator[Chunk]:
        for batch in batches:
            if batch is None:
                yield (), None
            elif batch:
                keys = range(len(batch)) if decoding.sampling is None else self.keys(batch)
                yield keys, self.encode(batch)

    result = Text
    returns = "A Text; with results=N, a list of N, the best first"

    def answer(self, result: list[Text], options: WritingOptions) -> Text | list[Text] | None:
        return best_or_list(result, options)

    def record(self, source: Any, result: list[Text], options: Any, *, form: str = "jsonl") -> Rows:
        scores = [{"logprob": text.logprob, "confidence": text.confidence} for text in result]
        name = {self.names[0]: self.name_of(source)}
        return [
            {**name, **rank, self.names[1]: text.text, **score}
            for rank, text, score in zip(rank_fields(result, options), result, scores, strict=True)
        ]

    def notes(self, sources: Sequence[Any], options: WritingOptions) -> Iterator[str | UserError]:
        yield from note_width(self.width(options))

    def width(self, options: WritingOptions) -> int:
        return self.build_decoding(options).columns

    def prepack(self, rows: int, *, more: bool = True) -> None:
        if more or rows > 1:
            prepack(self.model.encoder)
            prepack_for_decoding(self.model.decoder, rows=rows)


def best_or_list(texts: list[Item], options: DecodingOptions) -> Item | list[Item] | None:
    """Returns the texts of an input; with results=1, the best text, or None if there is none."""
    return texts if options.results > 1 else next(iter(texts), None)


def rank_fields(texts: Sequence[Item], options: DecodingOptions) -> list[dict[str, int]]:
    """Returns the rank of each text as fields of a record; empty with results=1."""
    return [{"rank": rank} if options.results > 1 else {} for rank, _ in enumerate(texts, start=1)]


def note_width(texts: int) -> Iterator[str]:
    """Yields a note about a slow search, if it decodes many texts in parallel."""
    if texts >= MANY_TEXTS:
        line = f"note: {texts:,} texts per input are decoded in parallel"
        yield f"{line}, which takes at least {texts:,} times as long as one"


class Trace(Output):
    """The file of --trace: the trees of beam searches as JSON, written at the end.

    Attributes:
        trees: The search tree of each input by the input's name, to be filled; None without --trace.
    Args:
        path: The file, if any.
        predictor: The model.
        options: Its options.
        inputs: Files that are read.
        out: The file of --out.
    Raises:
        UserError: There is no beam search, or the file is that of --out or an input.
    """

    def __init__(
        self, path: str | None, predictor: Any, options: Any, *, inputs: Iterable[str], out: str | None
    ) -> None:
        if path is not None and predictor.build_decoding(options).beam == 1:
            raise UserError("--trace: requires beam search; add --beam N with N greater than 1")
        if path is not None and out is not None and os.path.realpath(path) == os.path.realpath(out):
            raise UserError(f"--trace {path}: is the same file as --out; choose another")
        super().__init__(path, option="--trace", inputs=inputs)
        self.predictor = predictor
        self.trees: dict[str, list | None] | None = None if path is None else {}

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.trees:
                piece = self.predictor.tokenizer.piece
                nodes = {name: as_json(tree, piece) for name, tree in self.trees.items() if tree is not None}
                self.write(json.dumps(nodes, ensure_ascii=False))
        finally:
            super().__exit__(kind, fault, trace)


def split_words(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Yields the words of a text with the indices of their tokens; in scripts without spaces, each token is a word."""
    word = decoded = ""
    places: list[int] = []
    unfinished: list[int] = []  # tokens of an incomplete character
    for place, token in enumerate(tokens):
        if token in tokenizer.language_ids:  # language tokens are part of the prompt
            continue
        unfinished.append(place)
        text = tokenizer.decode(tokens[: place + 1])
        if text.endswith("\ufffd") and place + 1 < len(tokens):
            continue
        piece, decoded = text[len(decoded) :], text
        is_new_word = any(map(spaceless_pattern().match, (word[-1:], piece[:1]))) and piece[:1].isalnum()
        if (piece.startswith(" ") or is_new_word) and word.strip():
            yield word.strip(), places
            word, places = "", []
        word, places, unfinished = word + piece, [*places, *unfinished], []
    if word.strip():
        yield word.strip(), places


@torch.inference_mode()
def word_probabilities(writer: Writer, context: Context, tokens: Sequence[int]) -> list[tuple[str, float]]:
    """Returns the words of a text with the probability of each given those before; runs the decoder on the text again.

    Args:
        context: The input, encoded, one row.
        tokens: The text, without begin and end; at most as many as the decoder's positions.
    """
    if not tokens:
        return []
    begin = writer.tokenizer.bos_id if context.begin is None else int(context.begin)
    read = torch.tensor([[begin, *tokens[:-1]]], device=writer.device)
    hidden = writer.model.decoder(read, None, context)  # (1, L, D)
    logprobs = writer.model.head(hidden)[0].float().log_softmax(-1)  # (L, V)
    logprob_of_tokens = [row[token].item() for row, token in zip(logprobs, tokens, strict=True)]
    return [
        (word, exp(sum(logprob_of_tokens[at] for at in places)))
        for word, places in split_words(tokens, writer.tokenizer)
    ]
