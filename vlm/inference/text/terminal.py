"""Continuations of prompts, and their output on a terminal."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vlm.errors import printable_lines


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
        self.current = self.texts = self.written = 0
        self._begin()

    def watch(self, place: int, texts: Sequence[Sequence[int]]) -> bool:
        """Writes the new part of the current text; the others wait."""
        if place == self.current and len(texts) == 1:
            self._grow(self.decode(texts[0]).rstrip("\ufffd"))  # the bytes of a character may be spread over tokens
        return True

    def finish(self, texts: Sequence[Continuation]) -> None:
        """Writes the rest of the current prompt's texts."""
        for number, one in enumerate(texts):
            if number:
                self._begin()
            self._grow(one.text)
            self._put("\n")
        self.current += 1
        self._begin()

    def _begin(self) -> None:
        if self.current < len(self.prompts):
            self._put(("---\n" if self.texts else "") + self.prompts[self.current])
            self.texts, self.written = self.texts + 1, 0

    def _grow(self, text: str) -> None:
        self._put(text[self.written :])
        self.written = max(self.written, len(text))

    def _put(self, text: str) -> None:
        sys.stdout.write(printable_lines(text))
        sys.stdout.flush()
