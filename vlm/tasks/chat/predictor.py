"""Answers in conversations, many in a batch."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vlm.checkpoint.stored import DecodingDefaults
from vlm.data.images.image import Preprocess
from vlm.data.text.conversation import Turn
from vlm.decoding.constraints import Rules, in_vocabulary
from vlm.decoding.continuation import SampledToken, continue_texts
from vlm.decoding.grammar import Grammar
from vlm.decoding.sampling import Sampling
from vlm.decoding.token_scores import TokenScore
from vlm.errors import UserError
from vlm.inference.command_options import AnswerOptions, ChatOptions, CompletionOptions
from vlm.inference.inputs import ImageSource, open_image
from vlm.inference.options import DecodingOptions, SamplingOptions, check_stored_decoding
from vlm.inference.predictor import Predictor, Rows, Stored, TextPredictor, Watch, check_outputs, offset_watch
from vlm.inference.tasks import command_names, commands_by_task
from vlm.models.context import Context, interleave_states
from vlm.models.decoder import Decoder
from vlm.nn.step.packed import prepack, prepack_for_decoding
from vlm.tasks.captioning.predict import encode_pixels

MAX_TOKENS = 256  # default length of an answer
MAX_BIAS = 100  # of a token's logit
TO_CHAT = (
    "to chat, train task=conversations with model=vision_language, or with model/fusion=prefix "
    "model.fusion.causal=true model.fusion.counted=true model/position=rotary"
)
TOGETHER = 2**15  # most tokens of prompts and answers in a batch, since the cache of a long one takes much memory


class TurnWithImages(NamedTuple):
    """A turn of a conversation, with its images as `open_image` takes them."""

    turn: Turn
    images: Sequence[ImageSource] = ()


@dataclass(eq=False)
class Prompt:
    """A conversation as the model reads it.

    Args:
        tokens: Their ids, with PLACE for each state of an image. Prompts with the same object are read once.
        pixels: Its images, whole or in squares, uint8 (T, 3, H, W); None if there are none.
        seed: Seed of its answer; here and not in the options, so that conversations with different seeds share a batch.
        grammar: What its answer matches, if anything; here for the same reason.
        scores: Filled with the scores of its answer's tokens, the end token included, if the options ask for them.
        prompt_scores: Filled with those of the prompt's tokens.
    """

    tokens: Sequence[int]
    pixels: Tensor | None
    seed: int
    grammar: Grammar | None = None
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore | None] = field(default_factory=list)

    def choices(self, count: int) -> "list[Prompt]":
        """Returns this prompt `count` times, with consecutive seeds."""
        return [replace(self, seed=self.seed + place, scores=[]) for place in range(count)]


@dataclass
class Reply:
    """An answer in a conversation.

    Args:
        logprob: Log-probability of its tokens in nats.
        read: Number of tokens read, including the states of images.
        ended: Whether the model or a stop text ended it, rather than the maximum length.
        tokens: Its tokens without the end.
    """

    text: str = ""
    logprob: float = 0.0
    read: int = 0
    ended: bool = False
    tokens: list[int] = field(default_factory=list)


class ChatPredictor(TextPredictor[Sequence[TurnWithImages], Prompt, Reply, ChatOptions]):
    """A trained model that answers in conversations; arguments as in Predictor."""

    task = "captioning"  # or another task with this predictor
    fields = ("text",)
    options = ChatOptions
    stored: ClassVar[Stored] = {"preprocess": Preprocess.from_state, "decoding": check_stored_decoding}
    preprocess: Preprocess | None = None  # set for a model that reads images
    decoding: DecodingDefaults = DecodingDefaults()

    @property
    def decoder(self) -> Decoder:
        return getattr(self.model, "decoder", self.model)

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        assert self.form is not None
        return [self.tokenizer.eos_id, *self.decoding.get("ends", ()), *self.form.ends(self.tokenizer)]

    def check(self) -> None:
        hidden = self.decoder(torch.tensor([[self.tokenizer.bos_id]], device=self.device))
        check_outputs(self.decoder.head(hidden), self.tokenizer.vocab_size, "tokens")

    def check_chat(self) -> None:
        """Checks that the model reads conversations.

        Raises:
            UserError: It does not, or its chat format is unknown.
        """
        if self.form is None or self.form.chat is None:
            prompted = ("chat", "answer", "detect")  # of models that read images in prompts
            unusable = prompted if self.form is None and self.model_task == "captioning" else ("chat",)
            usable = [f"`vlm {name}`" for name in command_names(self.model_task) if name not in unusable]
            problem = "has no chat template"
            raise UserError(f"this model for {self.model_task} {problem}; use {' or '.join(usable)}")
        if not self.form.can_chat:
            raise UserError("this model reads single instructions and cannot chat; use `vlm answer`")
        prefix = getattr(self.decoder, "prefix", None)
        if self.preprocess is not None and not (prefix is not None and prefix.causal and prefix.counted):
            how = "by cross-attention" if prefix is None else "as a prefix without causal attention"
            raise UserError(f"this model reads an image {how}, so it answers single questions (vlm answer); {TO_CHAT}")

    def check_options(self, options: AnswerOptions) -> None:
        self.check_chat()
        if "" in (options.stop or ()):
            fault = "must not be empty, because every answer would end at once"
            raise UserError(f"--stop: {fault}; give a string, or leave it out")
        self.plan_decoding(options)
        self.build_grammar(options)

    def build_grammar(self, options: AnswerOptions) -> Grammar | None:
        """Returns what answers match, if anything; white space before an answer is not part of it."""
        return options.build_grammar(self.tokenizer, self.ends, removed="any")

    def plan_decoding(self, options: AnswerOptions) -> tuple[Sampling, int, Rules]:
        """Returns the sampling of an answer, its maximum length in tokens, and the checkpoint's constraints on it."""
        sampling_options = {name: getattr(options, name) for name in SamplingOptions.__dataclass_fields__}
        chosen = DecodingOptions(**sampling_options, beam=1).resolve(self.decoding, samples_by_default=True)
        sampling = chosen.build_sampling() if chosen.sample is not False else Sampling(temperature=0.0)
        rules = chosen.build_rules(self.tokenizer)
        never = in_vocabulary(self.decoding.get("never", ()), self.tokenizer.vocab_size)
        rules = replace(rules, banned=(*rules.banned, *((token,) for token in never)))
        if isinstance(options, ChatOptions):
            rules = replace(
                rules,
                frequency_penalty=options.frequency_penalty,
                presence_penalty=options.presence_penalty,
                bias=self._read_bias(options.logit_bias or {}),
            )
        return sampling, MAX_TOKENS if chosen.max_tokens is None else chosen.max_tokens, rules

    def _read_bias(self, bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
        """Returns token ids with their bias.

        Raises:
            UserError: A key is not a token's id, or a value is out of range.
        """
        for token, value in bias.items():
            if not re.fullmatch("[0-9]{1,9}", token) or int(token) >= self.tokenizer.vocab_size:
                most = self.tokenizer.vocab_size - 1
                raise UserError(f"logit_bias: {token!r:.40} is not the id of a token; ids are 0 to {most}")
            if not abs(value) <= MAX_BIAS:
                raise UserError(f"logit_bias: {value:g} is invalid; it must be from -{MAX_BIAS} to {MAX_BIAS}")
        return tuple((int(token), value) for token, value in bias.items() if value)

    def preprocess_views(self, image: ImageSource) -> tuple[Tensor, tuple[int, int]]:
        """Preprocesses an image: whole or in squares, uint8 (T, 3, H, W), and the rows and columns of squares.

        Raises:
            UserError: It cannot be read, or the model reads none.
        """
        if self.preprocess is None:
            remedy = "use vlm answer if it was trained on image questions"
            raise UserError(f"images: this model cannot chat about images; {remedy}")
        pixels, rows, columns = self.preprocess.views(open_image(image))
        return pixels, (rows, columns)

    def encode_views(self, pixels: Tensor) -> Tensor:
        """Encodes squares of images: uint8 (T, 3, H, W) -> states (T * S, D)."""
        assert self.preprocess is not None
        return encode_pixels(self.model, self.preprocess, pixels.to(self.device)).states.flatten(0, 1)

    def prepare(self, source: Sequence[TurnWithImages], options: ChatOptions) -> Prompt:
        assert self.form is not None
        views = [self.preprocess_views(image) for turn in source for image in turn.images]
        turns, squares = [turn.turn for turn in source], [squares for _, squares in views]
        tokens = self.form.conversation(self.tokenizer, turns, squares).tokens
        if len(tokens) >= self.decoder.max_len:
            raise ContextFullError(format_context_full(len(tokens), self.decoder.max_len))
        pixels = torch.cat([pixels for pixels, _ in views]) if views else None
        return Prompt(tokens, pixels, options.seed, self.build_grammar(options))

    def results(
        self, batches: Iterable[Sequence[Prompt] | None], options: ChatOptions, *, watch: Watch | None = None
    ) -> Iterator[tuple[int, Reply]]:
        first = 0
        for batch in self._group_prompts(takewhile(bool, batches), options):
            replies = [Reply(read=len(prompt.tokens)) for prompt in batch]
            for place in self._fill_replies(batch, replies, options, offset_watch(watch, first)):
                yield first + place, replies[place]
            first += len(batch)

    def _group_prompts(
        self, batches: Iterable[Sequence[Prompt] | None], options: ChatOptions
    ) -> Iterator[Sequence[Prompt]]:
        """Yields groups of prompts whose caches fit in memory: at most `TOGETHER` tokens, or a single prompt."""
        _, max_tokens, _ = self.plan_decoding(options)
        for batch in batches:
            group: list[Prompt] = []
            for prompt in batch or ():
                longest = max(len(member.tokens) for member in [*group, prompt])
                if group and (1 + len(group)) * min(longest + max_tokens, self.decoder.max_len) > TOGETHER:
                    yield group
                    group = []
                group = [*group, prompt]
            yield group

    def _fill_replies(
        self, batch: Sequence[Prompt], replies: Sequence[Reply], options: ChatOptions, watch: Watch | None
    ) -> Iterator[int]:
        """Fills the replies to prompts; yields the place of each when it is complete."""
        _, max_tokens, _ = self.plan_decoding(options)
        limits = [self.count_available_tokens(prompt) for prompt in batch]
        ended = set[int]()
        for step in self._sample_tokens(batch, options, max_tokens=min(max_tokens, max(limits)), ended=ended):
            for item in step:
                reply, most = replies[item.prompt], min(max_tokens, limits[item.prompt])
                self.append_token(reply, item.token, item.logprob, options)
                if getattr(options, "logprobs", None) is not None and len(reply.tokens) > len(
                    batch[item.prompt].scores
                ):
                    batch[item.prompt].scores.append(TokenScore(item.token, item.logprob, item.top))
                complete = reply.ended or len(reply.tokens) >= most
                cancelled = watch is not None and not watch(item.prompt, [reply.tokens])
                if complete or cancelled:
                    ended.add(item.prompt)
                    grammar = batch[item.prompt].grammar
                    if grammar is not None and item.token in self.ends:
                        reply.ended = grammar.accepts(reply.tokens)
                    yield item.prompt
        yield from (place for place in range(len(batch)) if place not in ended)  # of answers without tokens

    def count_available_tokens(self, prompt: Prompt) -> int:
        """Returns the maximum number of tokens of an answer that fit into the context window."""
        return self.decoder.max_len - len(prompt.tokens)

    def _sample_tokens(
        self, batch: Sequence[Prompt], options: ChatOptions, *, max_tokens: int, ended: set[int]
    ) -> Iterator[list[SampledToken]]:
        sampling, _, rules = self.plan_decoding(options)
        sources = dict[int, Prompt]()  # by the identity of their tokens
        for prompt in batch:
            sources.setdefault(id(prompt.tokens), prompt)
        keys = prompts = [list(prompt.tokens) for prompt in batch]
        context: Context | None = None
        if any(prompt.pixels is not None for prompt in batch):
            pixels = torch.cat([prompt.pixels for prompt in sources.values() if prompt.pixels is not None])
            context = interleave_states([list(source.tokens) for source in sources.values()], self.encode_views(pixels))
            prompts = [tokens[-1:] for tokens in prompts]
        first, *further_ends = self.ends
        places = {key: place for place, key in enumerate(sources)}
        scores_prompts = isinstance(options, CompletionOptions) and options.echo and options.logprobs is not None
        with torch.autocast(torch.device(self.device).type, enabled=False):
            yield from continue_texts(
                self.decoder,
                prompts,
                sampling=sampling,
                max_tokens=max_tokens,
                eos_id=first,
                seed=[prompt.seed for prompt in batch],
                ends=further_ends,
                context=context,
                keys=keys,
                ended=ended,
                rules=rules,
                sources=[places[id(prompt.tokens)] for prompt in batch],
                top=options.logprobs or 0,
                prompt_scores=[source.prompt_scores for source in sources.values()] if scores_prompts else None,
                grammars=[prompt.grammar for prompt in batch],
            )

    def append_token(self, reply: Reply, token: int, logprob: float, options: AnswerOptions) -> None:
        """Adds a token to a reply, or ends the reply."""
        reply.logprob += logprob
        reply.ended = token in self.ends
        if not reply.ended:
            reply.tokens.append(token)
            reply.text, reply.ended = cut_at_stop(self.decode(reply.tokens), options.stop or ())

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of an answer's tokens."""
        return self.tokenizer.decode(tokens).lstrip()

    def record(
        self, source: Sequence[TurnWithImages], result: Reply, options: ChatOptions, *, form: str = "jsonl"
    ) -> Rows:
        return [{"text": result.text, "logprob": result.logprob}]

    def prepack(self, rows: int, *, more: bool = True) -> None:
        if self.preprocess is not None:
            prepack(self.model.encoder)
        prepack_for_decoding(self.decoder, rows=rows)


def find_chat_predictor(predictor: Predictor) -> ChatPredictor | None:
    """Returns a predictor for conversations with the same model; None if the model does not support them."""
    if predictor.task not in commands_by_task("chat"):
        return None
    chat_predictor = ChatPredictor.with_same_model(predictor)
    try:
        chat_predictor.check_chat()
    except UserError:
        return None
    return chat_predictor


class ContextFullError(UserError):
    """The conversation has no room for a question and its answer."""


def format_context_full(tokens: int, room: int) -> str:
    """Returns the message for a conversation that leaves no space for an answer in the context window."""
    return f"the conversation is full: it has {tokens:,} tokens, and the context window {room:,}, including the answer"


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Returns the text of an answer up to the first stop text, and whether there was one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def visible_text(text: str, stops: Sequence[str]) -> str:
    """Returns a partial text without a possible beginning of a stop text, and without an incomplete character."""
    held = max((count for stop in stops for count in range(1, len(stop)) if text.endswith(stop[:count])), default=0)
    return text[: len(text) - held].rstrip("\ufffd")
