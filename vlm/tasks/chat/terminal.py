"""The command `vlm chat`: a conversation in the terminal. torch is imported only when it runs."""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from vlm.errors import UserError, print_error, printable_lines
from vlm.inference.arguments import check_readable, check_utf8
from vlm.inference.command_options import AnswerOptions, ChatArguments
from vlm.inference.options import ModelOptions
from vlm.machine import paused_collection

if TYPE_CHECKING:
    from vlm.tasks.chat.session import Chat

COMMANDS = {
    "/image": "PATH: attach an image to your next message",
    "/forget": "drop the oldest question and its answer",
    "/reset": "start a new conversation without images",
    "/quit": "quit; so does the end of the input",
}
ROOM = "/forget drops the oldest question, /reset starts a new conversation; --forget drops the oldest automatically"


def chat(arguments: ChatArguments, model: ModelOptions, options: AnswerOptions) -> int:
    """Chats until the input ends; returns the exit status: 1 if a message got no answer.

    If stdin is a file or a pipe, each of its lines is a message of the user.
    """
    from vlm.inference.inputs import find_images

    paths = find_images(arguments.images or [], repeated=True)
    for path in paths:
        check_readable([path])
    with paused_collection():
        from vlm.tasks.chat.predictor import ChatPredictor, ContextFullError
        from vlm.tasks.chat.session import Chat

    predictor = model.load(ChatPredictor)
    predictor.prepack(1)
    talk = Chat(predictor, options, system=arguments.system, forget=arguments.forget)
    for path in paths:
        talk.show(path)
    if typed := sys.stdin.isatty():
        print("\n".join(f"{name} {help}" for name, help in COMMANDS.items()), file=sys.stderr)
    status = 0
    for line in _read_messages(typed=typed):
        name, _, rest = line.partition(" ")
        if name == "/quit":
            break
        try:
            _run_command(talk, name, rest.strip()) if re.fullmatch("/[A-Za-z]+", name) else _answer(talk, line)
        except UserError as fault:
            remedy = ROOM if talk.exchanges else "shorten the message or --system"
            print_error(f"{fault}; {remedy}" if isinstance(fault, ContextFullError) else fault)
            status = status if typed else 1
    return status


def _read_messages(*, typed: bool) -> Iterator[str]:
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


def _run_command(talk: "Chat", name: str, rest: str) -> None:
    if name == "/image":
        from vlm.inference.inputs import find_images

        for path in find_images([rest]):
            talk.show(path)
    elif name == "/reset":
        talk.reset()
    elif name != "/forget":
        raise UserError(f"{name}: unknown command; use {', '.join(COMMANDS)}")
    elif not talk.forget():
        raise UserError("/forget: the conversation has no question yet")


def _answer(talk: "Chat", line: str) -> None:
    """Writes the answer to a line as it grows; an interrupt ends it."""
    check_utf8([line])
    has_output = False
    try:
        for piece in talk.stream(line):
            has_output = True
            sys.stdout.write(printable_lines(piece))
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=sys.stderr, flush=True)
    if has_output:
        print(flush=True)
    if not talk.room:
        print(f"note: the answer ends here: the conversation is full; {ROOM}", file=sys.stderr)
