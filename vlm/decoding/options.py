"""Decoding options, and the texts that decoding returns."""

from dataclasses import dataclass, field
from typing import Literal

from vlm.decoding.constraints import Rules
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Decoding options. The default is greedy search.

    Args:
        beam: Number of beams; 1 is greedy search.
        groups: Number of groups of beams that avoid each other's tokens (Vijayakumar et al. 2018).
        diversity: Penalty of a token, in nats, for each beam of an earlier group that chose it at the same step.
        length_penalty: Hypotheses are ranked by log-probability / length ** length_penalty; the end token counts.
        results: Number of texts per input.
        sampling: If given, tokens are sampled instead of searched.
        rules: Constraints on texts.
        max_tokens: Maximum number of tokens of a text, with the prefix and without the end token; default the decoder's
            maximum.
        seed: Seed of sampling; a draw depends on it and the input's id only.
        logprobs: Whether to compute log-probabilities where a search does not need them; it costs a pass over the
            logits.
        ends: Tokens that end a text besides the end token.
        never: Tokens that no text contains, as if the vocabulary lacked them.
        forced_end: Whether the last token of a text of maximum length is the end token, as in BART and Marian.
        end_counts: Whether the end token counts in max_tokens, as in Hugging Face's lengths.
        early_stopping: "never" searches until no hypothesis can enter the results. As in Hugging Face's search, False
            stops when all beams have finished texts and no continuing one would rank higher if it ended now; True stops
            when all beams have finished texts.
        prune: Whether beam search stops once no hypothesis can enter the results. The results are the same; only tests
            and lectures turn it off.
    Raises:
        UserError: Options contradict each other or are invalid.
    """

    beam: int = 1
    groups: int = 1
    diversity: float = 0.5
    length_penalty: float = 1.0
    results: int = 1
    sampling: Sampling | None = None
    rules: Rules = field(default_factory=Rules)
    max_tokens: int | None = None
    seed: int = 0
    logprobs: bool = True
    ends: tuple[int, ...] = ()
    never: tuple[int, ...] = ()
    forced_end: bool = False
    end_counts: bool = False
    early_stopping: bool | Literal["never"] = "never"
    prune: bool = True

    def __post_init__(self) -> None:
        for name, value in (("--beam", self.beam), ("--groups", self.groups), ("--results", self.results)):
            if value < 1:
                raise UserError(f"{name} {value} is invalid; it must be at least 1")
        if self.sampling is not None and self.beam > 1:
            raise UserError("--sample and --beam exclude each other; give one (--sample --results N samples N texts)")
        if self.sampling is None and self.results > self.beam:
            raise UserError(f"--results {self.results} needs --beam {self.results} or more, or --sample")
        if self.beam % self.groups:
            raise UserError(f"--groups {self.groups} does not divide --beam {self.beam}; change one")
        if not self.diversity >= 0:
            raise UserError(f"--diversity {self.diversity:g} is invalid; it must be 0 or more")
        if not abs(self.length_penalty) <= 100:
            raise UserError(f"--length-penalty {self.length_penalty:g} is invalid; it must be between -100 and 100")
        if self.rules.grammar is not None and self.beam > 1:
            option = self.rules.grammar.source.option
            raise UserError(f"{option} and --beam exclude each other; give one of them")
        if self.rules.required and self.groups > 1:
            raise UserError("--require and --groups exclude each other; give one of them")

    @property
    def columns(self) -> int:
        """Number of texts per input that are decoded in parallel."""
        return self.beam if self.sampling is None else self.results

    def longest_text(self, max_len: int) -> int:
        """Maximum number of tokens of a text, with the prefix and without the end token.

        Args:
            max_len: Maximum number of tokens of the decoder.
        Raises:
            UserError: The constraints need more tokens than that.
        """
        longest = max_len if self.max_tokens is None else min(self.max_tokens, max_len)
        rules = self.rules
        if rules.prefix and len(rules.prefix) >= longest:
            raise UserError(
                f"--prefix and --language take {len(rules.prefix)} tokens, but a text has at most {longest}; "
                "shorten the prefix or raise --max-tokens"
            )
        if rules.min_tokens > longest:
            raise UserError(
                f"--min-tokens: {rules.min_tokens} tokens (prefix included) are more than the maximum of {longest}; "
                "give less"
            )
        needed = len(rules.prefix) + sum(min(map(len, ways)) for ways in rules.required)
        if rules.required and needed > longest:
            raise UserError(f"--require: these words need {needed} tokens, a text has at most {longest}; give fewer")
        return longest


@dataclass
class Hypothesis:
    """A generated text.

    Args:
        tokens: Token ids without begin token and prefix; with the end token, if it was reached.
        logprobs: Log-probability of each token according to the model, in nats; empty if not requested.
        score: Ranking score of beam search; else the sum of the log-probabilities.
    """

    tokens: list[int]
    logprobs: list[float]
    score: float
