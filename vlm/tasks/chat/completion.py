"""Continuations of prompts as they are, without a chat template, and log-probabilities of their tokens."""

from collections.abc import Sequence

from vlm.decoding.grammar import Grammar
from vlm.errors import UserError
from vlm.inference.command_options import AnswerOptions, CompletionOptions
from vlm.inference.predictor import Predictor
from vlm.tasks.chat.predictor import ChatPredictor, ContextFullError, Prompt, find_chat_predictor


class CompletionPredictor(ChatPredictor):
    """A trained language model that continues prompts of a service; arguments as in Predictor."""

    options = CompletionOptions

    @property
    def ends(self) -> list[int]:  # not cached: chat has others
        """The tokens that end a text."""
        return [self.tokenizer.eos_id, *self.decoding.get("ends", ())]

    def check_options(self, options: AnswerOptions) -> None:
        self.plan_decoding(options)
        self.build_grammar(options)

    def build_grammar(self, options: AnswerOptions) -> Grammar | None:
        return options.build_grammar(self.tokenizer, self.ends, removed="none")

    def encode(self, prompt: str | Sequence[int], name: str) -> list[int]:
        """Returns the tokens of a prompt; an empty text starts a document.

        Args:
            prompt: A text, or token ids.
            name: Its name in messages.
        Raises:
            UserError: It is too long, not UTF-8, or an id is none of the tokenizer.
        """
        room, vocab_size = self.decoder.max_len, self.tokenizer.vocab_size
        if isinstance(prompt, str):
            tokens = [*self.tokenizer.starts, *self.tokenizer.encode(prompt)] or [self.tokenizer.bos_id]
        else:
            tokens = list(prompt)
            if not tokens:
                raise UserError(f"{name}: has no tokens; send at least one, or a text")
            if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
                raise UserError(f"{name}: {wrong[0]} is not the id of a token; ids are 0 to {vocab_size - 1}")
        if len(tokens) > room:
            raise ContextFullError(f"{name}: has {len(tokens):,} tokens, more than the context window of {room:,}")
        return tokens

    def count_available_tokens(self, prompt: Prompt) -> int:
        return self.decoder.max_len - len(prompt.tokens) + 1  # the last token is not read

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens inside a text: a space at its beginning is kept."""
        return b"".join(map(self.tokenizer.bytes_of, tokens)).decode("utf-8", "replace")


def find_completion_predictor(predictor: Predictor) -> CompletionPredictor | None:
    """Returns a predictor that continues prompts with the same model; None if it is not a language model."""
    if predictor.model_task != "language_modeling" and find_chat_predictor(predictor) is None:
        return None
    return CompletionPredictor.with_same_model(predictor)
