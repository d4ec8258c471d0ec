"""Decoding of texts in a task's evaluations."""

from collections.abc import Mapping
from typing import Any, Protocol

from vlm.data.text.tokenizer import Tokenizer
from vlm.decoding.options import Decoding
from vlm.inference.options import DecodingOptions
from vlm.inference.writing import Text, likeliest
from vlm.models.context import Context
from vlm.models.encoder_decoder import EncoderDecoder
from vlm.nn.step.replay import StepperPool


class Writes(Protocol):
    """A task whose model writes texts."""

    @property
    def model(self) -> EncoderDecoder: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class TextSearch:
    """Decodes texts from encoded inputs with a task's model: by beam search in a test, greedily in a validation.

    Args:
        max_tokens: Longest text, in tokens.
        beam: Hypotheses of each search of a test; 1 is greedy.
        length_penalty: They are ranked by log-probability / length ** length_penalty.
    """

    def __init__(self, task: Writes, *, max_tokens: int, beam: int, length_penalty: float) -> None:
        self.task, self.greedy = task, Decoding(max_tokens=max_tokens)
        self.search = Decoding(max_tokens=max_tokens, beam=beam, length_penalty=length_penalty)

    def follow(self, stored: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Uses the decoding options of a Hugging Face folder, as the commands do.

        Args:
            stored: The options in the checkpoint.
            config: The task's config, whose options take precedence.
        """
        own = {name: config[name] for name in ("beam", "length_penalty", "max_tokens")}
        chosen = DecodingOptions().resolve({**stored, **own})
        self.search = chosen.search(chosen.rules(self.task.tokenizer), sample=False)

    def begin(self) -> None:
        self.pool = StepperPool()  # a GPU records a decode step once for all batches

    def end(self) -> None:
        del self.pool  # frees its memory

    def texts(self, context: Context, *, final: bool, language: str | None = None) -> list[Text]:
        task, decoding = self.task, self.search if final else self.greedy
        return likeliest(task.model, task.tokenizer, context, decoding, pool=self.pool, language=language)

    def description(self) -> dict[str, Any]:
        """Returns options that a checkpoint stores for the commands."""
        stored = {name: getattr(self.search, name) for name in ("beam", "length_penalty")}
        return {"max_tokens": self.search.max_tokens, "decoding": stored}
