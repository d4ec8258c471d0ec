"""An input on its way through the engine: its answer to come, and the times of its tokens."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from vlm.inference.options import settings
from vlm.inference.predictor import Predictor

Texts = Sequence[Sequence[int]]  # the tokens of each text of an input, so far


class Job:
    """An input that was accepted.

    Args:
        predictor: The model.
        content: The input as `Predictor.prepare` made it, or the UserError that it raised, which is the answer then.
        options: Options of the request.
        grown: Called with the texts on the engine's thread, whenever a token of them comes.
    Attributes:
        settings: The options without what stands beside the input; jobs with equal ones run together.
        answer: The result to come.
        times: For each text, seconds from acceptance to each of its tokens.
        progress: When the last token came, by the clock of `time.monotonic`; acceptance before the first.
    """

    def __init__(
        self, predictor: Predictor, content: Any, options: Any, *, grown: Callable[[Texts], None] | None = None
    ) -> None:
        self.predictor, self.content, self.options, self.grown = predictor, content, options, grown
        self.settings = settings(options)
        self.answer: Future = Future()
        self.times: list[list[float]] = []
        self._start = self.progress = time.monotonic()
        self.left = False  # nobody waits for the answer any more

    def leave(self) -> None:
        """Says that nobody waits for the answer any more."""
        self.left = True
        self.answer.cancel()

    def note(self, texts: Texts) -> None:
        """Notes the time of the tokens that are new in the texts."""
        now = time.monotonic()
        self.times += [[] for _ in texts[len(self.times) :]]
        for times, tokens in zip(self.times, texts, strict=False):
            if len(tokens) > len(times):
                self.progress = now
                times += [round(now - self._start, 4)] * (len(tokens) - len(times))

    def show(self, texts: Texts) -> bool:
        """Takes in texts that may have grown; false where nobody waits for them any more."""
        if texts and not self.left:
            self.note(texts)
            if self.grown is not None:
                self.grown([list(tokens) for tokens in texts])  # the model may add to its own lists
        return not self.left
