"""The predictor of chat models: encodes conversations and answers many of them in a batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vlm.data.images.image import Preprocess
from vlm.data.text.conversation import Turn
from vlm.decoding.constraints import Rules, in_vocabulary
from vlm.decoding.continuation import SampledToken, continue_texts
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.inference.command_options import AnswerOptions, ChatOptions
from vlm.inference.inputs import open_image
from vlm.inference.options import DecodingOptions, SamplingOptions, stored_options
from vlm.inference.predictor import Rows, TextPredictor, Watch, check_outputs, offset_watch
from vlm.inference.tasks import suggest_commands
from vlm.models.context import Context, interleaved
from vlm.models.decoder import Decoder
from vlm.nn.step.packed import prepack, prepack_for_decoding
from vlm.tasks.captioning.predict import encode_pixels

MAX_TOKENS = 256  # default length of an answer
TO_CHAT = (
    "to chat, train task=conversations with model=vision_language, or with model/fusion=prefix "
    "model.fusion.causal=true model.fusion.counted=true model/position=rotary"
)
TOGETHER = 2**15  # most tokens of prompts and answers in a batch, since the cache of a long one takes much memory


class TurnWithImages(NamedTuple):
    """A turn of a conversation, with its images as `open_image` takes them."""

    turn: Turn
    images: Sequence[Any] = ()


class Prompt(NamedTuple):
    """A conversation as the model reads it.

    Args:
        tokens: Their ids, with PLACE for each state of an image.
        pixels: Its images, whole or in squares, uint8 (T, 3, H, W); None if there are none.
        seed: Seed of its answer. It belongs to the prompt and not to the options of `results`, so that conversations
            with different seeds share a batch.
    """

    tokens: Sequence[int]
    pixels: Tensor | None
    seed: int


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


class ChatPredictor(TextPredictor):
    """A trained model that answers in conversations; arguments as in Predictor."""

    task = "captioning"  # or another task with this predictor
    fields = ("text",)
    options = ChatOptions
    preprocess: Preprocess | None = None  # set for a model that reads images

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.decoding = stored_options(about)
        if "preprocess" in about:
            self.preprocess = Preprocess.from_state(about["preprocess"])

    @property
    def decoder(self) -> Decoder:
        return getattr(self.model, "decoder", self.model)

    @property
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
            remedy = f"use {suggest_commands(self.model_task, *unusable)}"
            raise UserError(f"this model for {self.model_task} has no chat template that vlm can use; {remedy}")
        if "assistant" not in self.form.chat.heads:
            raise UserError("this model reads single instructions and cannot chat; use `vlm answer`")
        prefix = getattr(self.decoder, "prefix", None)
        if self.preprocess is not None and not (prefix is not None and prefix.causal and prefix.counted):
            how = "by cross-attention" if prefix is None else "as a prefix without causal attention"
            raise UserError(f"this model reads an image {how}, so it answers single questions (vlm answer); {TO_CHAT}")

    def check_options(self, options: AnswerOptions) -> None:
        self.check_chat()
        if "" in (options.stop or ()):
            raise UserError(
                "--stop: must not be empty, because every answer would end at once; give a string, or leave it out"
            )
        self.plan_decoding(options)

    def plan_decoding(self, options: AnswerOptions) -> tuple[Sampling, int, Rules]:
        """Returns the sampling of an answer, its maximum length in tokens, and the checkpoint's constraints on it."""
        sampling_options = {name: getattr(options, name) for name in SamplingOptions.__dataclass_fields__}
        chosen = DecodingOptions(**sampling_options, beam=1).resolve(self.decoding, samples_by_default=True)
        sampling = chosen.build_sampling() if chosen.sample is not False else Sampling(temperature=0.0)
        rules = chosen.build_rules(self.tokenizer)
        never = in_vocabulary(self.decoding.get("never", ()), self.tokenizer.vocab_size)
        rules = replace(rules, banned=(*rules.banned, *((token,) for token in never)))
        return sampling, chosen.max_tokens or MAX_TOKENS, rules

    def preprocess_views(self, image: Any) -> tuple[Tensor, tuple[int, int]]:
        """Preprocesses an image: whole or in squares, uint8 (T, 3, H, W), and the rows and columns of squares.

        Raises:
            UserError: It cannot be read, or the model reads none.
        """
        if self.preprocess is None:
            raise UserError(
                "images: this model cannot chat about images; use vlm answer if it was trained on image questions"
            )
        pixels, rows, columns = self.preprocess.views(open_image(image))
        return pixels, (rows, columns)

    def encode_views(self, pixels: Tensor) -> Tensor:
        """Encodes squares of images: uint8 (T, 3, H, W) -> states (T * S, D)."""
        assert self.preprocess is not None
        return encode_pixels(self.model, self.preprocess, pixels.to(self.device)).states.flatten(0, 1)

    def prepare(self, source: Sequence[TurnWithImages], options: AnswerOptions) -> Prompt:
        assert self.form is not None
        views = [self.preprocess_views(image) for turn in source for image in turn.images]
        tokens = self.form.turns(
            self.tokenizer, [turn.turn for turn in source], [squares for _, squares in views]
        ).tokens
        if len(tokens) >= self.decoder.max_len:
            raise UserError(format_context_full(len(tokens), self.decoder.max_len))
        pixels = torch.cat([pixels for pixels, _ in views]) if views else None
        return Prompt(tokens, pixels, options.seed)

    def results(
        self, batches: Iterable[Sequence[Prompt] | None], options: AnswerOptions, *, watch: Watch | None = None
    ) -> Iterator[tuple[int, Reply]]:
        first = 0
        for batch in self._group_prompts(takewhile(bool, batches), options):
            replies = [Reply(read=len(prompt.tokens)) for prompt in batch]
            for place in self._fill_replies(batch, replies, options, offset_watch(watch, first)):
                yield first + place, replies[place]
            first += len(batch)

    def _group_prompts(
        self, batches: Iterable[Sequence[Prompt] | None], options: AnswerOptions
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
        self, batch: Sequence[Prompt], replies: Sequence[Reply], options: AnswerOptions, watch: Watch | None
    ) -> Iterator[int]:
        """Fills the replies to prompts; yields the place of each when it is complete."""
        sampling, max_tokens, rules = self.plan_decoding(options)
        limits = [self.decoder.max_len - len(prompt.tokens) for prompt in batch]
        ended = set[int]()
        shared_options: Any = {
            "sampling": sampling,
            "max_tokens": min(max_tokens, max(limits)),
            "ended": ended,
            "rules": rules,
        }
        for step in self._sample_tokens(batch, shared_options | {"seed": [prompt.seed for prompt in batch]}):
            for item in step:
                reply = replies[item.prompt]
                complete = self._append_token(reply, item, options) or len(reply.tokens) >= min(
                    max_tokens, limits[item.prompt]
                )
                cancelled = watch is not None and not watch(item.prompt, [reply.tokens])
                if complete or cancelled:
                    ended.add(item.prompt)
                    yield item.prompt

    def _sample_tokens(self, batch: Sequence[Prompt], options: Mapping[str, Any]) -> Iterator[list[SampledToken]]:
        prompts = [list(prompt.tokens) for prompt in batch]
        context: Context | None = None
        keys = prompts
        if any(prompt.pixels is not None for prompt in batch):
            pixels = torch.cat([prompt.pixels for prompt in batch if prompt.pixels is not None])
            context = interleaved(prompts, self.encode_views(pixels))
            prompts = [tokens[-1:] for tokens in prompts]
        first, *further_ends = self.ends
        with torch.autocast(self.device.type if isinstance(self.device, torch.device) else self.device, enabled=False):
            yield from continue_texts(
                self.decoder, prompts, context=context, keys=keys, eos_id=first, ends=further_ends, **options
            )

    def _append_token(self, reply: Reply, item: SampledToken, options: AnswerOptions) -> bool:
        """Adds a token to a reply; returns True if the reply is complete."""
        reply.logprob += item.logprob
        if item.token in self.ends:
            reply.ended = True
            return True
        reply.tokens.append(item.token)
        reply.text, reply.ended = cut_at_stop(self.tokenizer.decode, reply.tokens, options.stop or ())
        return reply.ended

    def record(self, source: Any, result: Reply, options: Any, *, form: str = "jsonl") -> Rows:
        return [{"text": result.text, "logprob": result.logprob}]

    def prepack(self, rows: int, *, more: bool = True) -> None:
        if self.preprocess is not None:
            prepack(self.model.encoder)
        prepack_for_decoding(self.decoder, rows=rows)


def format_context_full(tokens: int, room: int) -> str:
    """Returns the message for a conversation that leaves no space for an answer in the context window."""
    return f"the conversation is full: it has {tokens:,} tokens, and the context window {room:,}, including the answer"


def cut_at_stop(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], stops: Sequence[str]
) -> tuple[str, bool]:
    """Returns the text of an answer up to the first stop text, and whether there was one."""
    text = decode(tokens).lstrip()
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def visible_text(text: str, stops: Sequence[str]) -> str:
    """Returns a partial text without a possible beginning of a stop text, and without an incomplete character."""
    held = max((count for stop in stops for count in range(1, len(stop)) if text.endswith(stop[:count])), default=0)
    return text[: len(text) - held].rstrip("\ufffd")
