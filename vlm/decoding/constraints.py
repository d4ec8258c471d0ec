"""Constraints on generated texts: rules that change scores before a token is chosen, and required words."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlm.errors import UserError

Words = tuple[int, ...]
Required = Sequence[Sequence[Words]]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Constraints on a text. Those that Hugging Face has too are defined as there.

    Args:
        repetition_penalty: Divides positive scores, and multiplies negative scores, of tokens that the text contains
            (Keskar et al. 2019). Applied to logits by greedy search and sampling, to log-probabilities by beam search.
        no_repeat_ngram: No n-gram of this size occurs twice (Paulus et al. 2017); 0 disables it.
        min_tokens: Minimum number of tokens of a text, with the prefix and without the end token.
        prefix: Tokens that each text begins with. Other constraints count them, the score does not.
        banned: Token sequences that no text contains.
        required: Lists of token sequences; a text contains at least one sequence of each list.
    Raises:
        UserError: A value is invalid, or constraints contradict each other.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    min_tokens: int = 0
    prefix: Words = ()
    banned: tuple[Words, ...] = ()
    required: tuple[tuple[Words, ...], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(f"--repetition-penalty {self.repetition_penalty:g} is invalid; it must be greater than 0")
        for name, value in (("--no-repeat-ngram", self.no_repeat_ngram), ("--min-tokens", self.min_tokens)):
            if value < 0:
                raise UserError(f"{name} {value} is invalid; it must be 0 or more")
        if not all(self.banned) or not all(all(ways) for ways in self.required):
            raise UserError("--ban, --require: a word has no tokens; give words that contain letters")
        for count, ways in enumerate(self.required, start=1):
            if not any(self._allows(words) for words in ways):
                also = "--ban or --no-repeat-ngram" if self.no_repeat_ngram else "--ban"
                raise UserError(f"--require: {also} forbids its word {count}; remove one of them")

    def _allows(self, words: Words) -> bool:
        """Returns True if `banned` and `no_repeat_ngram` allow a text to contain these words."""
        ngrams = _runs(words, self.no_repeat_ngram) if self.no_repeat_ngram else []
        banned = any(run in _runs(words, len(run)) for run in self.banned)
        return not banned and len(set(ngrams)) == len(ngrams)

    @property
    def read_texts(self) -> bool:
        """Returns True if any constraint depends on the text so far."""
        texts = self.repetition_penalty != 1 or self.no_repeat_ngram or self.min_tokens
        return bool(texts or self.banned)


def within(tokens: Sequence[int], vocab: int) -> list[int]:
    """The tokens of a list that a vocabulary of this size has."""
    return [token for token in tokens if 0 <= token < vocab]


def allow_end(scores: Tensor, eos_id: int) -> None:
    """Allows the end token, in place, in rows where the constraints allow no token: scores (R, V)."""
    if 0 <= eos_id < scores.shape[1]:
        none = scores.amax(-1) == -torch.inf
        scores[:, eos_id].masked_fill_(none, 0.0)


def force_end(logits: Tensor, last: Tensor, eos_id: int) -> Tensor:
    """Allows only the end token in texts that have room for one more token.

    Args:
        last: Whether the texts of each row have room for one more token.
    Shapes:
        logits (R * G, V), last (R,) -> (R * G, V)
    """
    rows = last.repeat_interleave(len(logits) // max(1, len(last)))[:, None]
    others = torch.arange(logits.shape[1], device=logits.device) != eos_id
    return logits.masked_fill(rows & others, -torch.inf)


def _runs(words: Words, length: int) -> list[Words]:
    """All runs of a given length in these words."""
    return [words[at : at + length] for at in range(len(words) - length + 1)]


def penalise(scores: Tensor, texts: Tensor, penalty: float) -> Tensor:
    """Applies the repetition penalty to the tokens of each text: (R, V)."""
    index = torch.where(texts < 0, texts[:, :1], texts)  # fill repeats the begin token
    seen = scores.gather(1, index)
    return scores.scatter(1, index, torch.where(seen < 0, seen * penalty, seen / penalty))


def repeats(texts: Tensor, lengths: Tensor, n: int, vocab_size: int) -> Tensor:
    """Mask of the tokens that would repeat an n-gram of their text: bool (R, V)."""
    banned = torch.zeros(len(texts), vocab_size + 1, dtype=torch.bool, device=texts.device)
    if texts.shape[1] >= n:
        runs = texts.unfold(1, n, 1)  # (R, T - n + 1, n)
        last = runs[..., -1]
        again = (runs[..., :-1] == _tail(texts, lengths, n - 1)[:, None]).all(-1) & (last >= 0)
        banned.scatter_(1, torch.where(again, last, vocab_size), True)
    return banned[:, :vocab_size]


def follows(texts: Tensor, lengths: Tensor, words: Tensor) -> Tensor:
    """Mask of the texts that end with these words (W,): bool (R,)."""
    return (_tail(texts, lengths, len(words)) == words).all(-1)


def _tail(texts: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The last `count` tokens of each text, -2 where it has fewer: (R, count)."""
    places = lengths[:, None] + torch.arange(-count, 0, device=texts.device)
    return torch.where(places < 0, -2, texts.gather(1, places.clamp(min=0)))
