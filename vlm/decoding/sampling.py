"""Sampling of tokens from logits, and the history of tokens that its penalties need."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlm.decoding.constraints import Rules, allow_end, in_vocabulary, last_tokens, repeated_ngram_mask
from vlm.decoding.grammar import Grammar, GrammarStates
from vlm.errors import UserError
from vlm.nn.device import widest_float

MAX_TEMPERATURE = 1e9  # the distribution is uniform long before; torch accepts integers of up to 64 bits


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling distribution of a token; filters apply in this order, each to the tokens left by the previous one.

    Args:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keeps the k most probable tokens (Fan et al. 2018); 0 or -1 keeps all.
        top_p: Keeps the most probable tokens with at least this total probability (Holtzman et al. 2020), at least one.
        min_p: Keeps tokens of at least this probability relative to the most probable one (Nguyen et al. 2024).
    Raises:
        UserError: A value is outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < MAX_TEMPERATURE:
            raise UserError(
                f"--temperature {self.temperature} is invalid; it must be 0 (greedy) to {MAX_TEMPERATURE:g}"
            )
        if self.top_k is not None and self.top_k < -1:
            raise UserError(f"--top-k {self.top_k} is invalid; it must be at least 1, or 0 to keep all tokens")
        for name, value in (("--top-p", self.top_p), ("--min-p", self.min_p)):
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"{name} {value:g} is invalid; it must be from 0 to 1")

    def probabilities(self, logits: Tensor) -> Tensor:
        """The sampling distribution: logits (B, V) -> (B, V), rows sum to 1."""
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        # Shifted first: with a small temperature, large logits would become infinite and their difference NaN.
        probs = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_k is not None and 0 < self.top_k < probs.shape[-1]:
            probs = _filter_probs(probs, probs >= probs.topk(self.top_k).values[:, -1:])
        if self.top_p is not None:
            ordered, places = probs.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # probability of the more probable ones; 0 for the first, always kept
            keep = (before < self.top_p) | (before == 0)
            probs = _filter_probs(probs, keep.gather(-1, places.argsort(-1)))
        if self.min_p is not None:
            probs = _filter_probs(probs, probs >= self.min_p * probs.amax(-1, keepdim=True))
        return probs

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draws one token per row by inverting the cumulative distribution.

        Shapes:
            logits (B, V), uniform (B,) in [0, 1) -> tokens (B,)
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        cumulative = self.probabilities(logits.to(widest_float(logits.device))).cumsum(-1)
        # Scaled by the total, which rounding may make less than 1, so that no draw exceeds the last token.
        return torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]


def _filter_probs(probs: Tensor, keep: Tensor) -> Tensor:
    probs = probs * keep
    return probs / probs.sum(-1, keepdim=True)


def create_history(
    rules: Rules,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    device: torch.device,
    grammars: Sequence[Grammar | None] = (),
) -> "TokenHistory | None":
    """Creates the history of prompts and their answers so far; None if no constraint needs it.

    Args:
        prompts: Token ids. Negative ones stand for states of images, which constraints ignore.
        max_tokens: Maximum number of tokens of an answer.
        grammars: What each answer matches, if anything; default that of the rules.
    """
    if not rules.needs_history and not any(grammars):
        return None
    token_ids = [[max(token, prompt[0], 0) if token < 0 else token for token in prompt] for prompt in prompts]
    longest = max(map(len, token_ids)) + max_tokens
    history = TokenHistory(
        rules, rows=len(token_ids), beams=1, max_len=longest, bos_id=0, device=device, grammars=grammars
    )
    history.read([[*prompt, *answer] for prompt, answer in zip(token_ids, answers, strict=True)])
    if history.grammars is not None:
        history.grammars.read(answers)
    history.prompt_lengths = torch.tensor([len(prompt) for prompt in token_ids], device=device)[:, None, None]
    return history


def draw_next(
    sampling: Sampling, logits: Tensor, uniform: Tensor, history: "TokenHistory | None", ends: Sequence[int]
) -> Tensor:
    """Draws the next token of each text under its constraints, and adds it to the history, if there is one.

    Shapes:
        logits (R, V), uniform (R,) -> tokens (R,)
    """
    if history is None:
        return sampling.draw(logits, uniform)
    scores = history.constrain(logits.clone(), ends)
    allow_end(scores, ends[0])
    tokens = sampling.draw(scores, uniform)
    history.append(tokens[:, None], None)
    return tokens


class TokenHistory:
    """Tokens of R rows of G beams, begin token included, in preallocated memory. Used only if a constraint needs it.

    Args:
        rows: Number R of rows.
        beams: Number G of beams.
        max_len: Maximum number of tokens of a text.
        grammars: The grammar of each row; default that of the rules.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        rows: int,
        beams: int,
        max_len: int,
        bos_id: int,
        device: torch.device,
        grammars: Sequence[Grammar | None] = (),
    ) -> None:
        self.rules, self.bos_id = rules, bos_id
        grammars, skipped = grammars or [rules.grammar] * rows, len(rules.prefix)
        self.grammars = GrammarStates(grammars, columns=beams, skipped=skipped) if any(grammars) else None
        self.tokens = torch.full((rows, beams, max_len + 1), -1, device=device)  # the last column is never read
        self.lengths = torch.zeros(rows, 1, 1, dtype=torch.long, device=device)
        self.prompt_lengths = torch.ones_like(self.lengths)  # number of leading tokens that do not count in lengths
        # Copied to the device once: a copy in each step would wait for the device.
        self.banned = [(torch.tensor(run[:-1], dtype=torch.long, device=device), run[-1]) for run in rules.banned]
        self.bias_tokens = torch.tensor([token for token, _ in rules.bias], dtype=torch.long, device=device)
        self.bias = torch.tensor([value for _, value in rules.bias], dtype=torch.float32, device=device)
        self.begin(torch.arange(rows, device=device))

    def begin(self, rows: Tensor) -> None:
        self.tokens[rows] = -1
        self.tokens[rows, :, 0] = self.bos_id
        self.lengths[rows] = 1
        if self.grammars is not None:
            self.grammars.begin(rows.tolist())

    def read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begins each text with the tokens of a prompt instead of the begin token."""
        for row, prompt in enumerate(prompts):
            self.tokens[row, :, : len(prompt)] = torch.tensor(prompt, device=self.tokens.device)
            self.lengths[row] = self.prompt_lengths[row] = len(prompt)

    def append(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Appends a token to each text: tokens (R, G); parents (R, G) are the beams that they follow, or None."""
        if parents is not None:
            self.tokens = self.tokens.gather(1, parents[..., None].expand_as(self.tokens))
        self.tokens.scatter_(2, self.lengths.expand(-1, tokens.shape[1], 1), tokens[..., None])
        # Finished texts continue until new texts replace them: their tokens go to the last column, which is never read.
        self.lengths = (self.lengths + 1).clamp(max=self.tokens.shape[2] - 1)
        if self.grammars is not None:
            self.grammars.append(tokens.tolist())

    def select(self, rows: Tensor) -> None:
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]
        self.prompt_lengths = self.prompt_lengths[rows]
        if self.grammars is not None:
            self.grammars.select(rows.tolist())

    def constrain(self, scores: Tensor, ends: Sequence[int]) -> Tensor:
        """Applies all constraints except required words to scores (R * G, V); forbidden tokens get -inf.

        Changes its argument. Masks apply to all rows, because indexing by a bool mask would wait for the device.
        """
        rules, texts = self.rules, self.tokens[:, :, :-1].flatten(0, 1)
        lengths, chosen = (
            counts.expand(-1, self.tokens.shape[1], 1).reshape(-1)
            for counts in (self.lengths, self.lengths - self.prompt_lengths)
        )
        if rules.repetition_penalty != 1:
            index = torch.where(texts < 0, texts[:, :1], texts)  # fill repeats the begin token
            picked, penalty = scores.gather(1, index), rules.repetition_penalty
            scores = scores.scatter(1, index, torch.where(picked < 0, picked * penalty, picked / penalty))
        if rules.frequency_penalty or rules.presence_penalty:
            places = torch.arange(texts.shape[1], device=texts.device)
            is_chosen = (places >= (lengths - chosen)[:, None]) & (texts >= 0)
            counts = scores.new_zeros(len(texts), scores.shape[1] + 1)
            index = torch.where(is_chosen, texts, scores.shape[1])
            counts = counts.scatter_add_(1, index, torch.ones_like(index, dtype=scores.dtype))[:, :-1]
            scores = scores - rules.frequency_penalty * counts - rules.presence_penalty * (counts > 0)
        if rules.bias:
            scores = scores.index_add(1, self.bias_tokens, self.bias.to(scores.dtype).expand(len(scores), -1))
        has_bans = rules.no_repeat_ngram or self.banned or rules.min_tokens
        penalized = scores.clone() if self.grammars is not None and has_bans else scores
        if rules.no_repeat_ngram:
            scores.masked_fill_(repeated_ngram_mask(texts, lengths, rules.no_repeat_ngram, scores.shape[1]), -torch.inf)
        for before, token in self.banned:
            ends_with = (last_tokens(texts, lengths, len(before)) == before).all(-1)  # (R * G,)
            scores[:, token].masked_fill_(ends_with, -torch.inf)
        for end in in_vocabulary(ends, scores.shape[1]) if rules.min_tokens else ():
            scores[:, end].masked_fill_(chosen < rules.min_tokens, -torch.inf)
        if self.grammars is not None:
            if penalized is not scores:  # a ban might leave no token that a grammar allows
                governed = torch.tensor(self.grammars.rows).repeat_interleave(self.tokens.shape[1])
                scores = torch.where(governed.to(scores.device)[:, None], penalized, scores)
            self.grammars.constrain(scores)
        return scores
