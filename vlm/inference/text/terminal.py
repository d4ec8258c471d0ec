"""Continuations of prompts, and how they come on a terminal."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from vlm.errors import printable_lines


@dataclass
class Continuation:
    """Text after a prompt, and its log-probability in nats."""

    prompt: str
    text: str
    logprob: float


class TerminalWriter:
    """Writes continuations to the terminal in the order of their prompts, the foremost one as it comes.

    Args:
        prompts: Written before what continues them.
        first: Whether nothing has been written before.
    """

    def __init__(self, prompts: Sequence[str], *, first: bool) -> None:
        self.prompts = prompts
        self.current, self.written = 0, 0
        self._put(prompts[0] if first else f"---\n{prompts[0]}")

    def type(self, done: Sequence[Continuation]) -> None:
        text = done[self.current].text
        self._put(text[self.written :])
        self.written = len(text)

    def finish(self, done: Sequence[Continuation]) -> None:
        for place in range(self.current, len(done)):
            self.current, self.written = place, self.written if place == self.current else 0
            if place:
                self._put(f"\n---\n{self.prompts[place]}")
            self.type(done)
        self._put("\n")

    def _put(self, text: str) -> None:
        sys.stdout.write(printable_lines(text))
        sys.stdout.flush()
