"""Answers in conversations: many in a batch, or one whose KV cache persists between its turns."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, takewhile
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vlm.checkpoint.stored import DecodingDefaults
from vlm.data.images.image import Preprocess
from vlm.data.text.chat_template import ChatTemplate
from vlm.data.text.conversation import Turn
from vlm.decoding.constraints import Rules, in_vocabulary
from vlm.decoding.continuation import PromptCache, SampledToken, continue_texts
from vlm.decoding.grammar import Grammar
from vlm.decoding.sampling import Sampling, create_history, draw_next
from vlm.decoding.token_scores import TokenScore
from vlm.errors import UserError
from vlm.inference.command_options import AnswerOptions, ChatOptions, CompletionOptions
from vlm.inference.inputs import ImageSource, open_image
from vlm.inference.options import DecodingOptions, SamplingOptions, check_stored_decoding
from vlm.inference.predictor import Predictor, Rows, Stored, TextPredictor, Watch, check_outputs, offset_watch
from vlm.inference.tasks import command_names, commands_by_task
from vlm.models.context import PLACE, Context, interleave_states
from vlm.models.decoder import Decoder
from vlm.nn.step.packed import prepack, prepack_for_decoding
from vlm.randomness import numpy_rng
from vlm.tasks.captioning.predict import encode_pixels

MAX_TOKENS = 256  # default length of an answer
MAX_BIAS = 100  # of a token's logit
TO_CHAT = (
    "to chat, train task=conversations with model=vision_language, or with model/fusion=prefix "
    "model.fusion.causal=true model.fusion.counted=true model/position=rotary"
)
_NUMBERS = count(1)  # of attached images
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
            unusable = ("chat", "answer") if self.form is None and self.model_task == "captioning" else ("chat",)
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


@dataclass
class AttachedImage:
    """An image of the conversation.

    Args:
        number: A number below 0, unique for each image of this process.
        squares: Rows and columns that it is cut into.
        states: Its states (S, D).
    """

    number: int
    squares: tuple[int, int]
    states: Tensor


@dataclass
class Exchange:
    """A message of the user, with images, and the tokens of the answer."""

    text: str
    images: list[AttachedImage]
    answer: list[int] = field(default_factory=list)

    @property
    def turn(self) -> Turn:
        return Turn("user", self.text, (0,) * len(self.images))


class ContextFullError(UserError):
    """The conversation has no room for a question and its answer."""


class Chat:
    """A conversation whose KV cache persists between turns, so that the model reads only new tokens.

    Answers are kept as the generated tokens, because encoding their text again may give different ones.

    Args:
        predictor: The model.
        options: Options of all answers.
        system: The system prompt.
        forget: Whether to drop the oldest question and its answer if the context window is full.
        cache: KV cache to share between conversations that take turns; by default a new one.
    Raises:
        UserError: The model cannot chat, or options do not suit it.
    """

    def __init__(
        self,
        predictor: ChatPredictor,
        options: AnswerOptions,
        *,
        system: str | None = None,
        forget: bool = False,
        cache: PromptCache | None = None,
    ) -> None:
        predictor.check_options(options)
        self.predictor, self.options, self.system, self.drops_oldest = predictor, options, system, forget
        self.exchanges: list[Exchange] = []
        self._pending: list[AttachedImage] = []
        self._cache = PromptCache(predictor.decoder) if cache is None else cache
        self.reply = Reply()

    @property
    def turns(self) -> list[Turn]:
        """The turns so far, with the system prompt first."""
        return self._list_turns(self.exchanges)

    def _list_turns(self, exchanges: Sequence[Exchange]) -> list[Turn]:
        turns = [] if self.system is None else [Turn("system", self.system)]
        for exchange in exchanges:
            answer, _ = cut_at_stop(self.predictor.decode(exchange.answer), self.options.stop or ())
            turns += [exchange.turn, Turn("assistant", answer)]
        return turns

    @property
    def room(self) -> int:
        """Number of tokens by which the last answer could have been longer."""
        return self.predictor.decoder.max_len - self.reply.read - len(self.reply.tokens)

    def show(self, image: ImageSource) -> None:
        """Attaches an image to the next user turn.

        Args:
            image: A path, an image of Pillow, or an array (H, W, 3).
        """
        pixels, squares = self.predictor.preprocess_views(image)
        self._pending.append(AttachedImage(-next(_NUMBERS), squares, self.predictor.encode_views(pixels)))

    def say(self, text: str, *images: ImageSource) -> str:
        """Returns the complete answer to a message; arguments as in `stream`."""
        return "".join(self.stream(text, *images))

    def stream(self, text: str, *images: ImageSource) -> Iterator[str]:
        """Yields the answer in pieces as it is generated; if closed early, the conversation keeps the text so far.

        Args:
            images: As in `show`.
        Raises:
            ContextFullError: It does not fit into the context window.
            UserError: An image cannot be read, or the text names a special token.
        """
        for image in images:
            self.show(image)
        exchange, prompt = self._fit_question(text)
        self.exchanges.append(exchange)
        self._pending = []
        yield from self._stream_reply(exchange, prompt)

    def forget(self) -> bool:
        """Drops the oldest question and its answer; their images stay. Returns False if there is none to drop."""
        if not self.exchanges:
            return False
        images = self.exchanges.pop(0).images
        later = self.exchanges[0].images if self.exchanges else self._pending
        later[:0] = images
        return True

    def reset(self) -> None:
        """Drops all messages and images."""
        self.exchanges, self._pending = [], []

    def tokens(self) -> list[int]:
        """The conversation as the model reads it, with PLACE for each state of an image."""
        return [PLACE if token < 0 else token for token in self._tokenize(self.exchanges)]

    def _fit_question(self, text: str) -> tuple[Exchange, list[int]]:
        """Returns the new question and the prompt's tokens; drops the oldest questions to fit it if allowed."""
        room = self.predictor.decoder.max_len
        while True:
            exchange = Exchange(text, [*self._pending])
            tokens = self._tokenize([*self.exchanges, exchange])
            if len(tokens) < room:
                return exchange, tokens
            if not (self.drops_oldest and self.forget()):
                raise ContextFullError(format_context_full(len(tokens), room))

    def _tokenize(self, exchanges: Sequence[Exchange]) -> list[int]:
        """Returns the tokens of a conversation, in which each state of an image is the image's number."""
        form, tokenizer = self.predictor.form, self.predictor.tokenizer
        assert form is not None
        if isinstance(form.chat, ChatTemplate):
            images = [image for exchange in exchanges for image in exchange.images]
            numbers = (image.number for image in images for _ in range(len(image.states)))
            if not exchanges:
                return []
            turns, squares = self._list_turns(exchanges)[:-1], [image.squares for image in images]
            answers = [exchange.answer for exchange in exchanges[:-1]]
            prompt_tokens = form.conversation(tokenizer, turns, squares, answers=answers).tokens
            prompt = [next(numbers) if token == PLACE else token for token in prompt_tokens]
            return [*prompt, *exchanges[-1].answer]
        system_turns = [] if self.system is None else [Turn("system", self.system)]
        tokens: list[int] = []
        for place, exchange in enumerate(exchanges):
            squares = [image.squares for image in exchange.images]
            turns = [exchange.turn] if place else [*system_turns, exchange.turn]
            numbers = (image.number for image in exchange.images for _ in range(len(image.states)))
            prompt_tokens = form.conversation(tokenizer, turns, squares, continued=place > 0).tokens
            tokens += [next(numbers) if token == PLACE else token for token in prompt_tokens]
            tokens += form.past(tokenizer, exchange.answer)
        return tokens

    def _stream_reply(self, exchange: Exchange, prompt: Sequence[int]) -> Iterator[str]:
        sampling, max_tokens, rules = self.predictor.plan_decoding(self.options)
        max_tokens = min(max_tokens, self.predictor.decoder.max_len - len(prompt))
        states = [image.states for earlier in self.exchanges for image in earlier.images]
        image_states = torch.cat(states) if states else None
        prompt_key = (PLACE if token < 0 else token for token in prompt)
        numbers = numpy_rng(self.options.seed, "text", *prompt_key).random(max_tokens)
        draws = torch.from_numpy(numbers).to(self.predictor.device)
        device = self.predictor.decoder.token_embed.weight.device
        grammars = [self.predictor.build_grammar(self.options)]
        history = create_history(rules, [prompt], [[]], max_tokens=max_tokens, device=device, grammars=grammars)
        reply, ends, yielded = Reply(read=len(prompt), tokens=exchange.answer), self.predictor.ends, 0
        self.reply = reply
        while len(reply.tokens) < max_tokens and not reply.ended:
            logits = self._cache.logits([*prompt, *reply.tokens], image_states)
            token = int(draw_next(sampling, logits, draws[len(reply.tokens)][None], history, ends))
            self.predictor.append_token(reply, token, float(logits.log_softmax(-1)[0, token]), self.options)
            text = reply.text if reply.ended else visible_text(reply.text, self.options.stop or ())
            if len(text) > yielded:
                yield text[yielded:]
                yielded = len(text)
        yield reply.text[yielded:]
