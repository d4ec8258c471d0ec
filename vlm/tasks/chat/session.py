"""A conversation with a model, whose KV cache is kept from turn to turn, and the command `vlm chat`."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from vlm.data.text.conversation import Turn
from vlm.decoding.continuation import KeptText
from vlm.decoding.sampling import draw_next, history_of
from vlm.errors import UserError, print_error, printable_lines
from vlm.inference.command_options import AnswerOptions, ChatArguments
from vlm.inference.options import ModelOptions, refuse_undecoded
from vlm.models.context import PLACE
from vlm.randomness import numpy_rng
from vlm.tasks.chat.predictor import ChatPredictor, Reply, full, shown, spoken

_NUMBERS = count(1)


@dataclass
class Shown:
    """An image that was shown.

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
    images: list[Shown]
    answer: list[int] = field(default_factory=list)

    @property
    def turn(self) -> Turn:
        return Turn("user", self.text, len(self.images))


class Full(UserError):
    """The conversation has no room for a question and its answer."""


class Chat:
    """A conversation. What the model has read stays: of each turn it reads what is new.

    Answers stay in it as the tokens that the model wrote: read again, their text may give others.

    Args:
        predictor: The model.
        options: Options of all answers.
        system: The system prompt.
        forget: Whether the oldest question and its answer leave where there is no room for more.
        kept: What the model has read last, if conversations that take turns share it; by default its own.
    Raises:
        UserError: The model reads no conversations, or options do not go with it.
    """

    def __init__(
        self,
        predictor: ChatPredictor,
        options: AnswerOptions,
        *,
        system: str | None = None,
        forget: bool = False,
        kept: KeptText | None = None,
    ) -> None:
        predictor.check_options(options)
        self.predictor, self.options, self.system, self.oldest_leaves = predictor, options, system, forget
        self.exchanges: list[Exchange] = []
        self._waiting: list[Shown] = []
        self._kept = KeptText(predictor.decoder) if kept is None else kept
        self.reply = Reply()

    @property
    def turns(self) -> list[Turn]:
        """The turns so far, with the system prompt first."""
        before = [] if self.system is None else [Turn("system", self.system)]
        pairs = [(one.turn, Turn("assistant", self._spoken(one.answer)[0])) for one in self.exchanges]
        return [*before, *(turn for pair in pairs for turn in pair)]

    @property
    def room(self) -> int:
        """Number of tokens by which the last answer could have been longer."""
        return self.predictor.decoder.max_len - self.reply.read - len(self.reply.tokens)

    def show(self, image: Any) -> None:
        """Shows an image, which stands before what is said next.

        Args:
            image: A path, an image of Pillow, or an array (H, W, 3).
        """
        pixels, squares = self.predictor.views(image)
        self._waiting.append(Shown(-next(_NUMBERS), squares, self.predictor.states(pixels)))

    def say(self, text: str, *images: Any) -> str:
        """The whole answer to what is said; arguments as in `stream`."""
        return "".join(self.stream(text, *images))

    def stream(self, text: str, *images: Any) -> Iterator[str]:
        """Yields the answer as it grows, piece by piece; who closes it early keeps what was written so far.

        Args:
            images: As in `show`.
        Raises:
            Full: There is no room for it.
            UserError: An image cannot be read, or the text names a special token.
        """
        for image in images:
            self.show(image)
        exchange, prompt = self._asked(text)
        self.exchanges.append(exchange)
        self._waiting = []
        yield from self._answered(exchange, prompt)

    def forget(self) -> bool:
        """Drops the oldest question and its answer; their images stay. Returns False if there is none to drop."""
        if not self.exchanges:
            return False
        images = self.exchanges.pop(0).images
        later = self.exchanges[0].images if self.exchanges else self._waiting
        later[:0] = images
        return True

    def reset(self) -> None:
        """Drops all that was said and shown."""
        self.exchanges, self._waiting = [], []

    def tokens(self) -> list[int]:
        """The conversation as the model reads it, with PLACE for each state of an image."""
        return [PLACE if token < 0 else token for token in self._tokens(self.exchanges)]

    def _asked(self, text: str) -> tuple[Exchange, list[int]]:
        """Returns a new question, and the tokens up to its end; drops the oldest questions for it if allowed."""
        room = self.predictor.decoder.max_len
        while True:
            exchange = Exchange(text, [*self._waiting])
            tokens = self._tokens([*self.exchanges, exchange])
            if len(tokens) < room:
                return exchange, tokens
            if not (self.oldest_leaves and self.forget()):
                raise Full(full(len(tokens), room))

    def _tokens(self, exchanges: Sequence[Exchange]) -> list[int]:
        """Returns the tokens of a conversation, in which each state of an image is the image's number."""
        form, tokenizer = self.predictor.form, self.predictor.tokenizer
        assert form is not None
        before = [] if self.system is None else [Turn("system", self.system)]
        tokens: list[int] = []
        for place, one in enumerate(exchanges):
            squares = [image.squares for image in one.images]
            turns = [one.turn] if place else [*before, one.turn]
            numbers = (image.number for image in one.images for _ in range(len(image.states)))
            read = form.turns(tokenizer, turns, squares, begun=place > 0).tokens
            tokens += [next(numbers) if token == PLACE else token for token in read]
            tokens += form.past(tokenizer, one.answer)
        return tokens

    def _answered(self, exchange: Exchange, prompt: Sequence[int]) -> Iterator[str]:
        sampling, most, rules = self.predictor.planned(self.options)
        most = min(most, self.predictor.decoder.max_len - len(prompt))
        states = [image.states for one in self.exchanges for image in one.images]
        laid = torch.cat(states) if states else None
        seen = (PLACE if token < 0 else token for token in prompt)
        draws = torch.from_numpy(numpy_rng(self.options.seed, "text", *seen).random(most)).to(self.predictor.device)
        history = history_of(rules, [prompt], [[]], most=most, device=self.predictor.decoder.token_embed.weight.device)
        reply, ends, written = Reply(read=len(prompt), tokens=exchange.answer), self.predictor.ends, 0
        self.reply = reply
        while len(reply.tokens) < most and not reply.ended:
            logits = self._kept.logits([*prompt, *reply.tokens], laid)
            token = int(draw_next(sampling, logits, draws[len(reply.tokens)][None], history, ends))
            reply.logprob += float(logits.log_softmax(-1)[0, token])
            if token in ends:
                reply.ended = True
                break
            reply.tokens.append(token)
            reply.text, reply.ended = self._spoken(reply.tokens)
            text = reply.text if reply.ended else shown(reply.text, self.options.stop or ())
            if len(text) > written:
                yield text[written:]
                written = len(text)
        yield reply.text[written:]

    def _spoken(self, tokens: Sequence[int]) -> tuple[str, bool]:
        return spoken(self.predictor.tokenizer.decode, tokens, self.options.stop or ())


COMMANDS = {
    "/image": "PATH: shows an image with what you say next",
    "/forget": "drops the oldest question and its answer",
    "/reset": "begins anew, without images",
    "/quit": "ends, as does the end of the input",
}
ROOM = "/forget drops the oldest question, /reset begins anew; with --forget the oldest leave by themselves"


def chat(arguments: ChatArguments, model: ModelOptions, options: AnswerOptions) -> int:
    """Converses until the input ends; returns the exit status: 1 if something that was said had no answer.

    If stdin is a file or a pipe, each of its lines is a message of the user.
    """
    from vlm.inference.inputs import find_images
    from vlm.tasks.chat.predictor import ChatPredictor

    paths = find_images(arguments.images or [], repeated=True)
    predictor = model.load(ChatPredictor)
    predictor.prepack(1)
    talk = Chat(predictor, options, system=arguments.system, forget=arguments.forget)
    for path in paths:
        talk.show(path)
    if typed := sys.stdin.isatty():
        print("\n".join(f"{name} {help}" for name, help in COMMANDS.items()), file=sys.stderr)
    status = 0
    for line in _lines(typed=typed):
        name, _, rest = line.partition(" ")
        if name == "/quit":
            break
        try:
            _obey(talk, name, rest.strip()) if re.fullmatch("/[A-Za-z]+", name) else _answer(talk, line)
        except UserError as fault:
            remedy = ROOM if talk.exchanges else "say less, or give a shorter --system"
            print_error(f"{fault}; {remedy}" if isinstance(fault, Full) else fault)
            status = status if typed else 1
    return status


def _lines(*, typed: bool) -> Iterator[str]:
    """Yields the user's messages."""
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401  gives `input` line editing
    while True:
        try:
            line = (input("> ") if typed else next(sys.stdin)).strip()
        except (EOFError, StopIteration):
            return
        if line:
            yield line


def _obey(talk: "Chat", name: str, rest: str) -> None:
    if name == "/image":
        from vlm.inference.inputs import find_images

        for path in find_images([rest]):
            talk.show(path)
    elif name == "/reset":
        talk.reset()
    elif name != "/forget":
        raise UserError(f"{name}: is no command; there are {', '.join(COMMANDS)}")
    elif not talk.forget():
        raise UserError("/forget: nothing was said yet")


def _answer(talk: "Chat", line: str) -> None:
    """Writes the answer to a line as it grows; an interrupt ends it."""
    refuse_undecoded([line])
    written = False
    try:
        for piece in talk.stream(line):
            written = True
            sys.stdout.write(printable_lines(piece))
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=sys.stderr, flush=True)
    if written:
        print(flush=True)
    if not talk.room:
        print(f"note: the answer ends here: the conversation is full; {ROOM}", file=sys.stderr)
