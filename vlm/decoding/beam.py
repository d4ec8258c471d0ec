"""Beam search with an exact stopping criterion, diverse groups and required words (lexical constraints)."""

from collections.abc import Collection, Sequence
from functools import cache

import torch
from torch import Tensor

from vlm.decoding.beam_row import BeamLimits, BeamRow
from vlm.decoding.constraints import RequiredWords, force_end, in_vocabulary
from vlm.decoding.options import Decoding, Hypothesis
from vlm.decoding.sampling import TokenHistory

MIN_PART = 16  # for shorter parts, taking maxima first is slower
LAST = 1 << 40  # greater than any index of a continuing candidate


class BeamSearch:
    """Beam search with diverse groups (Vijayakumar et al. 2018, algorithm 1) and required words.

    At each step, the 2W best continuations of the W beams of each group are candidates. Those among the first W that
    end the text are finished; the W best that do not end it continue. This is Hugging Face's search with
    early_stopping="never", except that an input is done as soon as no continuation can enter its results.

    The device does not wait for the host; `DecodeState.reorder_beams` gives each beam its parent's keys:

        device, each step       logits -> candidates -> the W best that do not end: totals, tokens, parents
                                              |
        host, in `collect`                     +-------> BeamRow: a tree of nodes, finished texts, the end of the search

    With required words, candidates also include the tokens that continue them, and the end of texts that contain them.
    The beams that continue are shared equally among the numbers of required tokens that they hold.

    Args:
        steps: Maximum number of tokens chosen for a text, end token included.
        limit: Number of tokens at which an unfinished text is cut.
        traced: Whether to store all candidates of each step.
    Shapes:
        totals (R, G): sums of scores, -inf for missing beams; ages (R,): steps taken
    """

    def __init__(
        self, decoding: Decoding, *, steps: int, limit: int, ends: tuple[int, ...], traced: bool = False
    ) -> None:
        self.limits = BeamLimits(decoding=decoding, steps=steps, limit=limit, ends=ends, traced=traced)
        self.decoding, self.ends, self.width = decoding, ends, self.limits.width
        self.prefix = decoding.rules.prefix
        self.required: RequiredWords | None = None
        self.rows: list[BeamRow] = []
        self._pending: list[tuple[list[tuple[Tensor, Tensor]], int]] = []  # candidates of each group, and V

    def begin(self, ids: Sequence[int | str], device: torch.device) -> None:
        """Starts the search for these inputs."""
        self.rows = [BeamRow.begin(self.limits) for _ in ids]
        self.first = torch.full((self.decoding.beam,), -torch.inf, device=device)
        self.first[:: self.width] = 0.0
        self.totals = self.first.repeat(len(ids), 1)
        self.ages = torch.zeros(len(ids), dtype=torch.long, device=device)
        self.forced = torch.tensor(self.prefix, dtype=torch.long, device=device)
        if words := self.decoding.rules.required:
            self.required = RequiredWords(words, rows=len(ids), beams=self.decoding.beam, device=device)

    def replace(self, rows: Sequence[int], index: Tensor, ids: Sequence[int | str]) -> None:
        """Assigns rows to other inputs; `index` holds the same rows on the device."""
        for row in rows:
            self.rows[row] = BeamRow.begin(self.limits)
        self.totals[index] = self.first
        self.ages[index] = 0
        if self.required is not None:
            self.required.begin(index)

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Keeps only these rows, in this order."""
        self.rows = [self.rows[row] for row in rows]
        self.totals, self.ages = self.totals[index], self.ages[index]
        if self.required is not None:
            self.required.select(index)

    def choose(self, logits: Tensor, history: TokenHistory | None) -> tuple[Tensor, Tensor]:
        """Returns the next tokens of the beams and their parent beams: logits (R * G, V) -> two of (R, G)."""
        beams, vocab = self.decoding.beam, logits.shape[-1]
        if self.decoding.forced_end:
            logits = force_end(logits, self.ages - len(self.prefix) == self.limits.steps - 1, self.ends[0])
        logprobs = logits.log_softmax(-1)
        scores = logprobs if history is None else history.constrain(logprobs.clone(), self.ends)
        if self.required is not None:
            remaining = self.limits.limit - (self.ages - len(self.prefix)) - 1
            scores = self.required.constrain(scores.clone() if history is None else scores, remaining, self.ends)
        scores, logprobs = (part.view(len(self.rows), beams, vocab) for part in (scores, logprobs))
        candidates: list[tuple[Tensor, Tensor]] = []
        continuing: list[tuple[Tensor, Tensor, Tensor]] = []
        for group in range(self.decoding.groups):
            columns = slice(group * self.width, (group + 1) * self.width)
            candidates.append(self._find_candidates(scores[:, columns], logprobs[:, columns], group, continuing))
            continuing.append(self._select_continuing(*candidates[-1], group, vocab))
        self._pending.append((candidates, vocab))
        tokens, parents, totals = (torch.cat(parts, 1) for parts in zip(*continuing, strict=True))
        tokens, parents = self._store_step(tokens, parents, totals)
        if self.required is not None:
            self.required.append(tokens, parents)
        return tokens, parents

    def collect(self, already_ended: Collection[int]) -> list[tuple[int, list[Hypothesis]]]:
        """Returns the rows that have ended, except those known to have, with their texts. Waits for the device."""
        for groups, vocab in self._pending:
            lists = [(places.tolist(), values.tolist()) for places, values in groups]
            for place, row in enumerate(self.rows):
                row.step([(places[place], *(part[place] for part in values)) for places, values in lists], vocab)
        self._pending = []
        ended = (place for place, row in enumerate(self.rows) if row.ended and place not in already_ended)
        return [(place, self.rows[place].hypotheses()) for place in ended]

    def partial_texts(self, row: int) -> tuple[()]:
        """Returns nothing: any beam may be dropped until the search ends."""
        return ()

    def _find_candidates(
        self, scores: Tensor, logprobs: Tensor, group: int, before: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor]:
        """The best continuations of one group of each input.

        Args:
            before: Tokens, parents and totals of the earlier groups at this step.
        Shapes:
            scores and logprobs (R, W, V) -> places (R, n), beam * V + token; values (3, R, n): totals,
            log-probabilities and ranking scores
        """
        columns, vocab = slice(group * self.width, (group + 1) * self.width), scores.shape[-1]
        totals = scores + self.totals[:, columns, None]
        ranked = totals
        if before and self.decoding.diversity:  # penalty for each beam of an earlier group that chose the token now
            counts = totals.new_zeros(totals.shape[0], totals.shape[2])
            for tokens, _, sums in before:
                counts.scatter_add_(1, tokens, (sums > -torch.inf) * self.decoding.diversity)
            ranked = totals - counts[:, None]
        places = top_indices(ranked.flatten(1), min(1 + len(self.ends), vocab) * self.width)
        if self.required is None:
            return places, torch.stack([part.flatten(1).gather(1, places) for part in (totals, logprobs, ranked)])
        places, new = self._add_required_candidates(self.required, places, columns, vocab)
        values = torch.stack([part.flatten(1).gather(1, places) for part in (totals, logprobs, ranked)])
        return places, torch.where(new, values, -torch.inf)

    def _select_continuing(
        self, places: Tensor, values: Tensor, group: int, vocab: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and totals of the first W candidates that do not end the text: three tensors (R, W).

        With W = 2:

            candidates, best first     cat    END    dog    fox
            continue                    x      -      x      x
            order                       0    4 + 1    2      3      the two smallest: cat, dog
        """
        tokens, parents = places % vocab, places // vocab + group * self.width
        continues = values[2] > -torch.inf
        for end in self.ends:
            continues = continues & (tokens != end)
        order = torch.arange(places.shape[1], device=places.device)
        if self.required is not None:
            order = self._rank_by_bank(self.required, tokens, parents, torch.where(continues, values[0], -torch.inf))
        order = torch.where(continues, order, order + LAST).topk(self.width, largest=False).indices
        continues, tokens, parents, totals = (part.gather(1, order) for part in (continues, tokens, parents, values[0]))
        return tokens * continues, parents * continues, torch.where(continues, totals, -torch.inf)

    def _rank_by_bank(self, required: RequiredWords, tokens: Tensor, parents: Tensor, totals: Tensor) -> Tensor:
        """Ranks candidates so that the first W are spread equally over the banks, as in `BeamRow`.

        A bank holds the candidates with the same number of required tokens. Banks are interleaved, best candidates
        first:

            candidates, by total     a    b    c    d    e
            bank                     0    0    1    0    1
            place in the bank        0    1    0    2    1       order: c a, e b, d

        Shapes:
            tokens, parents and totals (R, n) -> (R, n)
        """
        bank = required.count_required_tokens(*required.transition(tokens, parents))
        place = torch.arange(tokens.shape[1], device=tokens.device)
        before = totals[:, :, None] > totals[:, None]  # whether one ranks before another
        before = before | ((totals[:, :, None] == totals[:, None]) & (place[:, None] < place))
        rank = (before & (bank[:, :, None] == bank[:, None])).sum(1)
        return rank * (required.lengths.sum() + 1) - bank

    def _store_step(self, tokens: Tensor, parents: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Stores totals and counts the step. Inside the prefix, beams stay in place and take its tokens."""
        if self.prefix:
            in_prefix = (self.ages < len(self.prefix))[:, None]
            forced = self.forced[self.ages.clamp(max=len(self.prefix) - 1)][:, None]
            columns = torch.arange(self.decoding.beam, device=tokens.device)
            tokens, parents = torch.where(in_prefix, forced, tokens), torch.where(in_prefix, columns, parents)
            totals = torch.where(in_prefix, self.totals, totals)
        self.totals = totals
        self.ages += 1
        return tokens, parents

    def _add_required_candidates(
        self, required: RequiredWords, places: Tensor, columns: slice, vocab: int
    ) -> tuple[Tensor, Tensor]:
        """Indices of the best continuations and of those for required words, and whether each is new: (R, n)."""
        requested, tokens = required.next_token_mask()[:, columns], required.tokens
        for end in in_vocabulary(self.ends, vocab):
            requested = torch.cat([requested, required.met[:, columns].all(-1, keepdim=True)], 2)
            tokens = torch.cat([tokens, tokens.new_full((1,), end)])
        first = vocab * torch.arange(self.width, device=places.device)[:, None]
        added = (first + tokens).flatten().expand(len(places), -1)
        new = requested.flatten(1) & (added[:, :, None] != places[:, None]).all(2)
        return torch.cat([places, added], 1), torch.cat([torch.ones_like(places, dtype=torch.bool), new], 1)


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest scores of each row, best first.

    This is faster than torch.topk on all scores. The best are in the parts with the largest maxima, which one pass
    finds:

        parts      2 9 4 | 1 0 1 | 7 8 3 | 5 5 6         count = 2
        maxima       9       1       8       6           the parts of 9 and 8 hold the two best
        best         9               8

    Shapes:
        scores (R, M) -> (R, count)
    """
    size = part_size(scores.shape[1])
    if size < MIN_PART or scores.shape[1] < 2 * size * count:
        return scores.topk(count).indices
    parts = scores.unflatten(1, (-1, size))  # (R, M / size, size)
    chosen = parts.amax(2).topk(count).indices
    candidates = parts.gather(1, chosen[..., None].expand(-1, -1, size)).flatten(1).topk(count).indices
    return chosen.gather(1, candidates // size) * size + candidates % size


@cache
def part_size(size: int) -> int:
    """The largest divisor of a row's length up to 128."""
    return max(part for part in range(1, 129) if size % part == 0)
