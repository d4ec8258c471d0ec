"""Constraints on generated texts: rules that change scores before a token is chosen, and required words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlm.errors import UserError

if TYPE_CHECKING:
    from vlm.decoding.grammar import Grammar

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
        frequency_penalty: Subtracted from the score of a token for each time that it was chosen.
        presence_penalty: Subtracted from the score of each token that was chosen.
        bias: Token ids with what is added to their scores.
        grammar: What each text matches after the prefix. Bans, n-grams and minimum lengths then do not apply.
    Raises:
        UserError: A value is invalid, or constraints contradict each other.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    min_tokens: int = 0
    prefix: Words = ()
    banned: tuple[Words, ...] = ()
    required: tuple[tuple[Words, ...], ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    grammar: "Grammar | None" = None

    def __post_init__(self) -> None:
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(f"--repetition-penalty {self.repetition_penalty:g} is invalid; it must be greater than 0")
        for name, value in (("--no-repeat-ngram", self.no_repeat_ngram), ("--min-tokens", self.min_tokens)):
            if value < 0:
                raise UserError(f"{name} {value} is invalid; it must be 0 or more")
        if not all(self.banned) or not all(all(ways) for ways in self.required):
            raise UserError("--ban, --require: a word has no tokens; use words that contain letters")
        for count, ways in enumerate(self.required, start=1):
            for words in ways:
                ngrams = _ngrams(words, self.no_repeat_ngram) if self.no_repeat_ngram else []
                banned = any(run in _ngrams(words, len(run)) for run in self.banned)
                if not banned and len(set(ngrams)) == len(ngrams):
                    break
            else:
                also = "--ban or --no-repeat-ngram" if self.no_repeat_ngram else "--ban"
                raise UserError(f"--require: {also} forbids required word {count}; remove one of them")

    @property
    def needs_history(self) -> bool:
        """Returns True if any constraint depends on the text so far."""
        texts = self.repetition_penalty != 1 or self.no_repeat_ngram or self.min_tokens
        more = self.frequency_penalty or self.presence_penalty or self.bias or self.grammar
        return bool(texts or self.banned or more)


def in_vocabulary(tokens: Sequence[int], vocab: int) -> list[int]:
    """The tokens of a list that a vocabulary of this size has."""
    return [token for token in tokens if 0 <= token < vocab]


def allow_end(scores: Tensor, eos_id: int) -> None:
    """Allows the end token, in place, in rows where the constraints allow no token: scores (R, V)."""
    if 0 <= eos_id < scores.shape[1]:
        none = scores.amax(-1) == -torch.inf
        scores[:, eos_id].masked_fill_(none, 0.0)


def force_end(logits: Tensor, last: Tensor, eos_id: int) -> Tensor:
    """Allows only the end token in texts that may have only one more token.

    Args:
        last: Whether the texts of each row may have only one more token.
    Shapes:
        logits (R * G, V), last (R,) -> (R * G, V)
    """
    rows = last.repeat_interleave(len(logits) // max(1, len(last)))[:, None]
    not_end = torch.arange(logits.shape[1], device=logits.device) != eos_id
    return logits.masked_fill(rows & not_end, -torch.inf)


def _ngrams(words: Words, length: int) -> list[Words]:
    """Returns all n-grams of a given length."""
    return [words[at : at + length] for at in range(len(words) - length + 1)]


def repeated_ngram_mask(texts: Tensor, lengths: Tensor, n: int, vocab_size: int) -> Tensor:
    """Mask of the tokens that would repeat an n-gram of their text: bool (R, V)."""
    banned = torch.zeros(len(texts), vocab_size + 1, dtype=torch.bool, device=texts.device)
    if texts.shape[1] >= n:
        runs = texts.unfold(1, n, 1)  # (R, T - n + 1, n)
        last = runs[..., -1]
        again = (runs[..., :-1] == last_tokens(texts, lengths, n - 1)[:, None]).all(-1) & (last >= 0)
        banned.scatter_(1, torch.where(again, last, vocab_size), True)
    return banned[:, :vocab_size]


def last_tokens(texts: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The last `count` tokens of each text, -2 where it has fewer: (R, count)."""
    places = lengths[:, None] + torch.arange(-count, 0, device=texts.device)
    return torch.where(places < 0, -2, texts.gather(1, places.clamp(min=0)))


def missing_requirements(text: Sequence[int], required: Required) -> list[Sequence[Words]]:
    """The requirements that a text does not meet yet."""
    return [ways for ways in required if not any(words in _ngrams(tuple(text), len(words)) for words in ways)]


def count_needed_tokens(text: Sequence[int], lacking: Required) -> int:
    """Number of tokens still needed: the remainder of the requirement that the text ends inside, and all of the others.

    Tokens shared by two requirements are counted twice.
    """
    full_lengths = [min(map(len, ways)) for ways in lacking]
    saved = [
        full - min(len(remaining_words(text, words)) for words in ways)
        for full, ways in zip(full_lengths, lacking, strict=True)
    ]
    return sum(full_lengths) - max(0, max(saved, default=0))


def next_tokens(text: Sequence[int], lacking: Required) -> set[int]:
    """Tokens that begin or continue a missing requirement."""
    return {words[0] for ways in lacking for way in ways for words in (remaining_words(text, way), way)}


def count_required_tokens(text: Sequence[int], required: Required) -> int:
    """Number of required tokens that a text contains: its bank (Post and Vilar 2018)."""
    return sum(min(map(len, ways)) for ways in required) - count_needed_tokens(
        text, missing_requirements(text, required)
    )


def remaining_words(text: Sequence[int], words: Words) -> Words:
    """Returns the words that must still follow a text, which may end inside them."""
    for count in range(min(len(words) - 1, len(text)), 0, -1):
        if tuple(text[-count:]) == words[:count]:
            return words[count:]
    return words


class RequiredWords:
    """Required words of R rows of G texts, as an automaton over the ends of texts (Aho and Corasick 1975).

    A text's node is its longest suffix that is a prefix of a required word. With "a b c" and "b d":

        text        x    a    b     d              c       b
        node        -    a    a b   b d: met       -       b

    Args:
        required: M lists of token sequences; a text must contain at least one sequence of each.
    Shapes:
        node (R, G), met bool (R, G, M); tables over T nodes and K tokens: goto (T, K + 1), the last column for all
        other tokens; meets (T, M), saved (T, M), useful (T, M, K)
    """

    def __init__(self, required: Required, *, rows: int, beams: int, device: torch.device) -> None:
        ways = [way for group in required for way in group]
        runs = sorted({way[:count] for way in ways for count in range(len(way) + 1)}, key=lambda run: (len(run), run))
        tokens = sorted({token for way in ways for token in way})
        number = {run: place for place, run in enumerate(runs)}

        self.tokens = torch.tensor(tokens, device=device)
        self.lengths = torch.tensor([min(map(len, group)) for group in required], device=device)
        goto = []
        for run in runs:  # a token leads to the longest suffix that is a node
            suffixes = [[(*run[at:], token) for at in range(len(run) + 1)] for token in tokens]
            goto.append([*(next((number[s] for s in longer if s in number), 0) for longer in suffixes), 0])
        self.goto = torch.tensor(goto, device=device)
        meets = [[any(run[-len(way) :] == way for way in group) for group in required] for run in runs]
        self.meets = torch.tensor(meets, device=device)
        short = [[min(len(remaining_words(run, way)) for way in group) for group in required] for run in runs]
        self.saved = self.lengths - torch.tensor(short, device=device)
        useful = [[[token in next_tokens(run, [group]) for token in tokens] for group in required] for run in runs]
        self.useful = torch.tensor(useful, device=device)
        self.node = torch.zeros(rows, beams, dtype=torch.long, device=device)
        self.met = torch.zeros(rows, beams, len(required), dtype=torch.bool, device=device)

    def begin(self, rows: Tensor) -> None:
        """Assigns rows to new texts."""
        self.node[rows] = 0
        self.met[rows] = False

    def select(self, rows: Tensor) -> None:
        self.node, self.met = self.node[rows], self.met[rows]

    def append(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Appends a token to each text: tokens (R, G); parents (R, G) are the beams that they follow, or None."""
        columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self.node, self.met = self.transition(tokens, columns if parents is None else parents)

    def transition(self, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Node and met requirements after one more token: tokens and parents (R, n) -> (R, n), (R, n, M)."""
        same = tokens[..., None] == self.tokens
        letter = torch.where(same.any(-1), same.int().argmax(-1), len(self.tokens))
        node = self.goto[self.node.gather(1, parents), letter]
        met = self.met.gather(1, parents[..., None].expand(-1, -1, self.met.shape[2]))
        return node, met | self.meets[node]

    def count_needed_tokens(self, node: Tensor, met: Tensor) -> Tensor:
        """Like the function `count_needed_tokens`: node (...), met (..., M) -> (...)."""
        lacking = ~met
        return (self.lengths * lacking).sum(-1) - (self.saved[node] * lacking).amax(-1)

    def count_required_tokens(self, node: Tensor, met: Tensor) -> Tensor:
        """Like the function `count_required_tokens`."""
        return self.lengths.sum() - self.count_needed_tokens(node, met)

    def next_token_mask(self) -> Tensor:
        """The tokens that begin or continue a missing requirement of each text: bool (R, G, K)."""
        return (self.useful[self.node] & ~self.met[..., None]).any(2)

    def constrain(self, scores: Tensor, remaining: Tensor, ends: Sequence[int]) -> Tensor:
        """Masks scores in place, with -inf, for tokens after which the missing requirements no longer fit.

        Args:
            remaining: Number of tokens that may follow the next one, end token excluded.
        Shapes:
            scores (R * G, V), remaining (R,)
        """
        budget = remaining[:, None].expand_as(self.node)
        for end in in_vocabulary(ends, scores.shape[1]):
            scores[:, end].masked_fill_(~self.met.all(-1).flatten(), -torch.inf)
        lacking = (self.lengths * ~self.met).sum(-1)
        tight = ((lacking > budget) & (lacking > 0)).flatten()[:, None]  # (R * G, 1)
        node = self.goto[self.node][..., :-1]  # (R, G, K)
        fits = self.count_needed_tokens(node, self.met[:, :, None] | self.meets[node]) <= budget[..., None]
        useful = (self.next_token_mask() & fits).flatten(0, 1)
        allowed = scores[:, self.tokens].masked_fill(tight & ~useful, -torch.inf)
        scores.masked_fill_(tight, -torch.inf)
        scores[:, self.tokens] = allowed
        return scores
