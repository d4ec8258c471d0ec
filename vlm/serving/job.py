"""An input in the engine: its future answer, and the times of its tokens."""

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
        content: The input as `Predictor.prepare` returned it, or the UserError that it raised, which is then the
            answer.
        options: Options of the request.
        grown: Called on the engine's thread with the texts, whenever one has a new token.
    Attributes:
        settings: The options without the input's parts; jobs with equal settings run together.
        answer: The future result.
        times: For each text, seconds from acceptance to each of its tokens.
        progress: Time of the last token by `time.monotonic`; before the first, that of acceptance.
    """

    def __init__(
        self, predictor: Predictor, content: Any, options: Any, *, grown: Callable[[Texts], None] | None = None
    ) -> None:
        self.predictor, self.content, self.options, self.grown = predictor, content, options, grown
        self.settings = settings(options)
        self.answer: Future = Future()
        self.times: list[list[float]] = []
        self._start = self.progress = time.monotonic()
        self.left = False  # no client waits for the answer any more

    def leave(self) -> None:
        """Cancels the job: no client waits for the answer any more."""
        self.left = True
        self.answer.cancel()

    def note(self, texts: Texts) -> None:
        """Records the time of new tokens in the texts."""
        now = time.monotonic()
        self.times += [[] for _ in texts[len(self.times) :]]
        for times, tokens in zip(self.times, texts, strict=False):
            if len(tokens) > len(times):
                self.progress = now
                times += [round(now - self._start, 4)] * (len(tokens) - len(times))

    def show(self, texts: Texts) -> bool:
        """Receives texts that may have grown; returns False if no client waits for them any more."""
        if texts and not self.left:
            self.note(texts)
            if self.grown is not None:
                self.grown([list(tokens) for tokens in texts])  # copied, because the model may extend its lists
        return not self.left
