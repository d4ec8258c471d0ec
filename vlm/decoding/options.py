"""Options of a search, and the texts that it finds."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from vlm.decoding.constraints import Rules
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Options of a search. By default the most probable token is taken at each step.

    Args:
        beam: Hypotheses that are kept of an image; 1 is greedy search.
        groups: Groups of beams that avoid each other's tokens (Vijayakumar et al. 2018).
        diversity: What a token costs, in nats, for each beam of an earlier group that took it at the same step.
        length_penalty: Hypotheses are ranked by log-probability / length ** length_penalty, the end token counted.
        results: Texts an image.
        sampling: Draws tokens instead of searching for the most probable ones.
        rules: What texts may say.
        max_tokens: The longest text, the prefix counted and the end token not; never more than the decoder has room
            for. None for that room.
        seed: Of what is drawn; a draw depends on it and the image's id alone.
        logprobs: Whether log-probabilities are wanted where a search can do without: they cost a pass over the logits.
        end_counts: Whether the end token counts in max_tokens, as it does in Hugging Face's lengths.
        early_stopping: "never" searches until no hypothesis can come among the results any more. As in Hugging Face's
            search, False ends once all beams have finished texts and none that goes on would be better if it ended
            now, True once they have finished texts.
        prune: Whether beam search ends once no hypothesis can come among the results any more, which changes nothing
            else. Only a test or a lecture turns it off.
    Raises:
        UserError: Options contradict each other or are outside their range.
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
    end_counts: bool = False
    early_stopping: bool | Literal["never"] = "never"
    prune: bool = True

    def __post_init__(self) -> None:
        for name, value in (("--beam", self.beam), ("--groups", self.groups), ("--results", self.results)):
            if value < 1:
                raise UserError(f"{name} {value} is not possible; give at least 1")
        if self.sampling is not None and self.beam > 1:
            raise UserError("--sample draws, --beam searches; give one of them (--sample --results N draws N texts)")
        if self.sampling is None and self.results > self.beam:
            raise UserError(f"--results {self.results} needs --beam {self.results} or more, or --sample")
        if self.beam % self.groups:
            raise UserError(f"--groups {self.groups} does not divide --beam {self.beam}; change one")
        if not self.diversity >= 0:
            raise UserError(f"--diversity {self.diversity:g} is not possible; give 0 or more")
        if not abs(self.length_penalty) <= 100:
            raise UserError(f"--length-penalty {self.length_penalty:g} is not possible; give a number of -100 to 100")
        if self.rules.required and self.groups > 1:
            raise UserError("--require and --groups both decide which hypotheses are kept; give one of them")

    @property
    def columns(self) -> int:
        """Texts of an image that are decoded side by side."""
        return self.beam if self.sampling is None else self.results

    def longest_text(self, max_len: int) -> int:
        """The longest text in tokens, the prefix counted and the end token not.

        Args:
            max_len: Room in the decoder's window.
        Raises:
            UserError: The rules ask for more than a text has room for.
        """
        longest = max_len if self.max_tokens is None else min(self.max_tokens, max_len)
        rules = self.rules
        if rules.prefix and len(rules.prefix) >= longest:
            raise UserError(
                f"a text begins with {len(rules.prefix)} tokens of --prefix or --language, and has at most {longest}; "
                "give fewer, or more --max-tokens"
            )
        if rules.min_tokens > longest:
            raise UserError(
                f"--min-tokens: a text of {rules.min_tokens} tokens is asked for (a prefix counts), "
                f"there is room for {longest}; give less"
            )
        needed = len(rules.prefix) + sum(min(map(len, ways)) for ways in rules.required)
        if rules.required and needed > longest:
            raise UserError(f"--require: these words need {needed} tokens, a text has at most {longest}; give fewer")
        return longest


@dataclass
class Hypothesis:
    """A text that a search finds.

    Args:
        tokens: Without the begin token and the prefix; with the end token, if it came to its end.
        logprobs: Log-probability, in nats, that the model gave each of them; empty if not wanted.
        score: What beam search ranked it by; else the sum of the log-probabilities.
    """

    tokens: list[int]
    logprobs: list[float]
    score: float


def shortfall(counts: Iterable[int], results: int) -> str | None:
    """A line for the user where inputs have fewer texts than results were asked for.

    Args:
        counts: Texts of each input.
        results: Texts that were asked for.
    """
    counts = list(counts)
    fewer = sum(count < results for count in counts)
    if not fewer:
        return None
    few = f"{fewer} of {len(counts)} inputs" if len(counts) > 1 else "the input"
    return f"note: fewer texts than --results {results} for {few}; more --beam may find others"
