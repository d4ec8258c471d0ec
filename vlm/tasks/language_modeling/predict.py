"""Text generation with a trained language model."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import ClassVar, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from vlm.checkpoint.stored import DecodingDefaults
from vlm.data.text.tokenizer import Tokenizer
from vlm.decoding.constraints import Rules
from vlm.decoding.continuation import continue_texts
from vlm.decoding.grammar import Grammar
from vlm.decoding.loop import TEXTS, decode
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError, printable_lines
from vlm.inference.arguments import PromptArguments
from vlm.inference.command_options import GenerationOptions
from vlm.inference.options import check_stored_decoding
from vlm.inference.predictor import Rows, Stored, TextPredictor, Watch, check_outputs, note_truncation, offset_watch
from vlm.inference.writing import best_or_list, note_width, rank_fields
from vlm.models.decoder import TextDecoder
from vlm.nn.step.packed import prepack_for_decoding
from vlm.nn.vocabulary_loss import token_losses


@dataclass
class Continuation:
    """Text after a prompt.

    Args:
        prompt: The prompt.
        text: The text after it.
        logprob: Log-probability in nats.
        tokens: Its tokens, without the end token.
    """

    prompt: str
    text: str
    logprob: float
    tokens: list[int] = field(default_factory=list)


class TerminalWriter:
    """Writes continuations to the terminal in the order of their prompts, the current one as it grows.

    Args:
        prompts: Written before their continuations.
        decode: Converts tokens to text.
    """

    def __init__(self, prompts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.prompts, self.decode = prompts, decode
        self.current = self.texts = self.printed = 0
        self._begin()

    def watch(self, place: int, texts: Sequence[Sequence[int]]) -> bool:
        """Writes the new part of the current text; later texts wait for their turn."""
        if place == self.current and len(texts) == 1:
            self._grow(self.decode(texts[0]).rstrip("\ufffd"))  # the bytes of a character may be spread over tokens
        return True

    def finish(self, texts: Sequence[Continuation]) -> None:
        """Writes the rest of the current prompt's texts."""
        for number, continuation in enumerate(texts):
            if number:
                self._begin()
            self._grow(continuation.text)
            self._print("\n")
        self.current += 1
        self._begin()

    def _begin(self) -> None:
        if self.current < len(self.prompts):
            self._print(("---\n" if self.texts else "") + self.prompts[self.current])
            self.texts, self.printed = self.texts + 1, 0

    def _grow(self, text: str) -> None:
        self._print(text[self.printed :])
        self.printed = max(self.printed, len(text))

    def _print(self, text: str) -> None:
        sys.stdout.write(printable_lines(text))
        sys.stdout.flush()


MAX_TOKENS = 256  # default length of a text


def generate(
    model: TextDecoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    seed: int,
    sampling: Sampling | None = None,
) -> list[Continuation]:
    """Continues all prompts in one batch."""
    steps = stream(model, tokenizer, prompts, max_tokens=max_tokens, seed=seed, sampling=sampling or Sampling())
    texts = dict(complete_texts(steps, tokenizer, prompts))
    return [texts[place] for place in range(len(prompts))]


class PartialText(NamedTuple):
    """A text after a new token: index of its prompt, tokens and log-probability so far, whether it has ended."""

    place: int
    tokens: list[int]
    logprob: float
    ended: bool


def stream(
    model: TextDecoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    seed: int,
    sampling: Sampling,
    ends: Sequence[int] = (),
    grammar: Grammar | None = None,
) -> Iterator[list[PartialText]]:
    """Continues prompts; after each step yields the texts that have a new token.

    An empty prompt starts a document; other prompts are taken as the middle of one.

    Args:
        ends: Further tokens that end a text, like the end token.
        grammar: What each continuation matches.
    """
    all_ends = (tokenizer.eos_id, *ends)
    ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    tokens, logprobs = [list[int]() for _ in prompts], [0.0] * len(prompts)
    for step in continue_texts(
        model,
        ids,
        sampling=sampling,
        max_tokens=max_tokens,
        eos_id=tokenizer.eos_id,
        seed=seed,
        ends=ends,
        rules=Rules(grammar=grammar),
    ):
        for item in step:
            logprobs[item.prompt] += item.logprob
            tokens[item.prompt] += [] if item.token in all_ends else [item.token]
        ended = [(item.prompt, item.token in all_ends) for item in step]
        yield [PartialText(place, tokens[place], logprobs[place], end) for place, end in ended]


def complete_texts(
    steps: Iterable[list[PartialText]], tokenizer: Tokenizer, prompts: Sequence[str], *, watch: Watch | None = None
) -> Iterator[tuple[int, Continuation]]:
    """Yields the index of each prompt with its text, when the text has ended.

    Args:
        steps: As `stream` yields them.
        watch: As in `Predictor.results`; if it returns False for all texts, all end.
    """
    last = {place: PartialText(place, [], 0.0, True) for place in range(len(prompts))}  # texts that have not ended
    for step in steps:
        last |= {text.place: text for text in step}
        done = [text.place for text in step if text.ended]
        if watch is not None and not any([watch(text.place, [text.tokens]) for text in step]):
            break
        yield from ((place, _convert_partial(tokenizer, prompts[place], last.pop(place))) for place in done)
    yield from ((place, _convert_partial(tokenizer, prompts[place], text)) for place, text in last.items())


def _convert_partial(tokenizer: Tokenizer, prompt: str, text: PartialText) -> Continuation:
    return Continuation(prompt, tokenizer.decode(text.tokens), text.logprob, text.tokens)


class TextGenerator(TextPredictor[str, str, list[Continuation], GenerationOptions]):
    """A trained language model that continues prompts; arguments as in Predictor."""

    result = Continuation
    returns = "A Continuation; with results=N, a list of N, the best first"
    task = "language_modeling"
    fields = ("prompt", "text")
    options = GenerationOptions
    arguments = PromptArguments
    stored: ClassVar[Stored] = {"decoding": check_stored_decoding}
    decoding: DecodingDefaults = DecodingDefaults()
    model: TextDecoder

    def check(self) -> None:
        hidden = self.model(torch.tensor([[self.tokenizer.bos_id]], device=self.device))
        check_outputs(self.model.head(hidden), self.tokenizer.vocab_size, "tokens")

    def plan_decoding(self, options: GenerationOptions) -> tuple[Sampling | Decoding, GenerationOptions]:
        """Returns the plan for decoding, sampling or a search, and the resolved options."""
        chosen = options.resolve(self.decoding, samples_by_default=True)
        chosen.max_tokens = chosen.max_tokens or MAX_TOKENS
        rules = replace(chosen.build_rules(self.tokenizer), grammar=self.build_grammar(options))
        sample = chosen.beam == 1 if chosen.sample is None else chosen.sample
        stored = self.decoding.get("never") or self.decoding.get("forced_end")
        free = not (replace(rules, grammar=None).needs_history or rules.required or stored)
        if chosen.beam == chosen.results == chosen.groups == 1 and free:
            return chosen.build_sampling() if sample else replace(chosen.build_sampling(), temperature=0.0), chosen
        return chosen.build_decoding(rules, sample=sample), chosen

    def build_grammar(self, options: GenerationOptions) -> Grammar | None:
        """Returns what texts match, if anything."""
        return options.build_grammar(self.tokenizer, (self.tokenizer.eos_id, *self.decoding.get("ends", ())))

    def check_options(self, options: GenerationOptions) -> None:
        self.plan_decoding(options)

    def results(
        self, batches: Iterable[Sequence[str] | None], options: GenerationOptions, *, watch: Watch | None = None
    ) -> Iterator[tuple[int, list[Continuation]]]:
        """Yields the texts of prompts, best first; arguments as in `Predictor.results`."""
        plan, chosen = self.plan_decoding(options)
        first = 0
        for batch in takewhile(bool, batches):
            assert batch is not None
            if isinstance(plan, Decoding):
                yield from enumerate(search_prompts(self, batch, plan, options.batch_size), start=first)
            else:
                assert chosen.max_tokens is not None  # plan_decoding sets it
                steps = stream(
                    self.model,
                    self.tokenizer,
                    batch,
                    sampling=plan,
                    ends=self.decoding.get("ends", ()),
                    max_tokens=chosen.max_tokens,
                    seed=chosen.seed,
                    grammar=self.build_grammar(options),
                )
                for place, text in complete_texts(steps, self.tokenizer, batch, watch=offset_watch(watch, first)):
                    yield first + place, [text]
            first += len(batch)

    def prepare(self, source: str, options: GenerationOptions) -> str:
        if isinstance(self.plan_decoding(options)[0], Decoding):
            count_available_tokens(self.model, encode_prompt(self.tokenizer, source))
        return source

    def answer(
        self, result: list[Continuation], options: GenerationOptions
    ) -> Continuation | list[Continuation] | None:
        return best_or_list(result, options)

    def record(
        self, source: str, result: list[Continuation], options: GenerationOptions, *, form: str = "jsonl"
    ) -> Rows:
        return [
            {"prompt": source, **rank, "text": continuation.text, "logprob": continuation.logprob}
            for rank, continuation in zip(rank_fields(result, options), result, strict=True)
        ]

    def notes(self, sources: Sequence[str], options: GenerationOptions) -> Iterator[str | UserError]:
        yield from note_width(self.width(options))
        lengths = [len(self.tokenizer.encode(prompt)) for prompt in sources]
        yield from note_truncation(lengths, self.model.max_len, names="prompts", part="beginning")

    @torch.inference_mode()
    def logprobs(self, texts: Sequence[str], *, batch_size: int) -> list[float]:
        """Returns log-probabilities of whole texts in nats: the sums over all tokens after the one that starts a text.

        Raises:
            UserError: A text is longer than the model's window.
        """
        starts = list(self.tokenizer.starts) or [self.tokenizer.bos_id]
        rows = [torch.tensor([*starts, *self.tokenizer.encode(text)]) for text in texts]
        most = self.model.max_len
        if too_long := next((text for text, row in zip(texts, rows, strict=True) if len(row) > most), None):
            raise UserError(f"{too_long[:40]!r}...: is longer than the {most} tokens that the model reads")
        order = sorted(range(len(texts)), key=lambda place: len(rows[place]))
        logprobs = [0.0] * len(texts)
        for at in range(0, len(order), batch_size):
            places = order[at : at + batch_size]
            tokens = pad_sequence([rows[place] for place in places], True, self.tokenizer.pad_id).to(self.device)
            lengths = torch.tensor([len(rows[place]) for place in places], device=self.device)
            steps = torch.arange(1, tokens.shape[1], device=self.device)
            scored = (steps >= len(starts)) & (steps < lengths[:, None])  # (B, L - 1)
            hidden, head = self.model(tokens[:, :-1]), self.model.head_parts
            losses = torch.zeros(scored.shape, device=self.device)
            picked = head.apply_transform(hidden[scored])
            losses[scored] = token_losses(picked, tokens[:, 1:][scored], head.weight, head.bias).float()
            for place, loss in zip(places, losses.double().sum(1).tolist(), strict=True):
                logprobs[place] = -loss
        return logprobs

    def make_terminal_writer(self, sources: Sequence[str]) -> TerminalWriter:
        return TerminalWriter(sources, self.tokenizer.decode)

    def width(self, options: GenerationOptions) -> int:
        plan, _ = self.plan_decoding(options)
        return plan.columns if isinstance(plan, Decoding) else 1

    def prepack(self, rows: int, *, more: bool = True) -> None:  # even a single text takes hundreds of steps
        prepack_for_decoding(self.model, rows=rows)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Returns the tokens of a prompt; an empty prompt starts a document."""
    return [*tokenizer.starts, *tokenizer.encode(prompt)] or [tokenizer.bos_id]


def count_available_tokens(model: TextDecoder, prompt: Sequence[int]) -> int:
    """Returns the number of tokens that fit in the model's window after a prompt.

    Raises:
        UserError: There is none.
    """
    if (room := model.max_len - len(prompt) + 1) <= 0:
        raise UserError(
            f"--prompt: has {len(prompt)} tokens; with --beam or rules, prompt and text share the model's window "
            f"of {model.max_len}; give a shorter one, or leave these options out"
        )
    return room


def search_prompts(
    generator: TextGenerator, prompts: Sequence[str], decoding: Decoding, batch_size: int
) -> Iterator[list[Continuation]]:
    """Yields the texts found for each prompt, best first. They end at the end of the model's window at the latest.

    Args:
        decoding: Its rules have no prefix. Token counts and required words apply to the generated text; rules on
            repetition also consider the prompt.
    Raises:
        UserError: A prompt leaves no room in the window, or less than the rules require.
    """
    tokenizer, model = generator.tokenizer, generator.model
    batch_size = max(1, min(batch_size, TEXTS // decoding.columns))
    for batch in (prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)):
        ids = [encode_prompt(tokenizer, prompt) for prompt in batch]
        prompts_by_steps: dict[int, list[int]] = {}  # prompts by the longest text that they allow
        for place, tokens in enumerate(ids):
            room = count_available_tokens(model, tokens)
            steps = room if decoding.max_tokens is None else min(decoding.max_tokens + 1, room)
            prompts_by_steps.setdefault(steps, []).append(place)
        texts: dict[int, list[Continuation]] = {}
        for places in prompts_by_steps.values():
            decoded = decode(
                model,
                [([batch[place] for place in places], None)],
                decoding,
                bos_id=tokenizer.bos_id,
                eos_id=tokenizer.eos_id,
                rows=len(places),
                device=model.token_embed.weight.device,
                prompts=[ids[place] for place in places],
            )
            for number, best in decoded:
                place = places[number]
                texts[place] = []
                for text in best:
                    tokens = [token for token in text.tokens if token not in (tokenizer.eos_id, *decoding.ends)]
                    logprob = sum(text.logprobs)
                    texts[place].append(Continuation(batch[place], tokenizer.decode(tokens), logprob, tokens))
        yield from (texts[place] for place in range(len(batch)))
