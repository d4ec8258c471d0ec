"""A conversation whose KV cache persists between its turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from vlm.data.text.chat_template import ChatTemplate
from vlm.data.text.conversation import Turn
from vlm.decoding.continuation import PromptCache
from vlm.decoding.sampling import create_history, draw_next
from vlm.inference.command_options import AnswerOptions
from vlm.inference.inputs import ImageSource
from vlm.models.context import PLACE
from vlm.randomness import numpy_rng
from vlm.tasks.chat.predictor import (
    ChatPredictor,
    ContextFullError,
    Reply,
    cut_at_stop,
    format_context_full,
    visible_text,
)

_NUMBERS = count(1)  # of attached images


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
