"""Beam search with an exact end, diverse groups, and words that texts must hold (lexical constraints)."""

from collections.abc import Collection, Sequence
from functools import cache

import torch
from torch import Tensor

from vlm.decoding.beam_row import BeamLimits, BeamRow
from vlm.decoding.options import Decoding, Hypothesis
from vlm.decoding.required import RequiredWords
from vlm.decoding.token_history import TokenHistory

SMALL_PART = 16  # scores of which a maximum says too little
LAST = 1 << 40  # behind all places of candidates that go on


class Beam:
    """Beam search, with diverse groups (Vijayakumar et al. 2018, algorithm 1) and words that texts must hold.

    At each step the 2W best continuations of the W beams of each of an image's groups are candidates: those among the
    first W that end the text are finished, and the W best that do not end it go on. That is Hugging Face's search with
    early_stopping="never", but that an image is done as soon as nothing can come among its results any more.

    Beams go on without a word from the host; `DecodeState.reorder_beams` then lets each see its parent's keys:

        device, each step       logits -> candidates -> the W best that do not end: totals, tokens, parents
                                              |
        host, in `collect`                     +-------> BeamRow: a tree of nodes, finished texts, the end of the search

    With required words, candidates also are the tokens that bring each beam further in them and the end of texts that
    hold them; as many beams go on of each number of required tokens, where there are that many.

    Args:
        steps: Tokens that may be chosen for a text, the end token counted.
        limit: Tokens at which a text is cut that did not end.
        traced: Whether every candidate of each step is kept.
    Shapes:
        totals (R, G): sums of scores, -inf where there is no beam; ages (R,): steps taken
    """

    def __init__(self, decoding: Decoding, *, steps: int, limit: int, eos_id: int, traced: bool = False) -> None:
        self.limits = BeamLimits(decoding=decoding, steps=steps, limit=limit, eos_id=eos_id, traced=traced)
        self.decoding, self.eos_id, self.width = decoding, eos_id, self.limits.width
        self.prefix = decoding.rules.prefix
        self.required: RequiredWords | None = None
        self.rows: list[BeamRow] = []
        self._unread: list[tuple[list[tuple[Tensor, Tensor]], int]] = []  # candidates of each group, and V

    def begin(self, ids: Sequence[int | str], device: torch.device) -> None:
        """Begins the search for these images."""
        self.rows = [BeamRow.begin(self.limits) for _ in ids]
        self.first = torch.full((self.decoding.beam,), -torch.inf, device=device)
        self.first[:: self.width] = 0.0
        self.totals = self.first.repeat(len(ids), 1)
        self.ages = torch.zeros(len(ids), dtype=torch.long, device=device)
        self.forced = torch.tensor(self.prefix, dtype=torch.long, device=device)
        if words := self.decoding.rules.required:
            self.required = RequiredWords(words, rows=len(ids), beams=self.decoding.beam, device=device)

    def replace(self, rows: Sequence[int], index: Tensor, ids: Sequence[int | str]) -> None:
        """Gives rows to other images; index holds the same rows on the device."""
        for row in rows:
            self.rows[row] = BeamRow.begin(self.limits)
        self.totals[index] = self.first
        self.ages[index] = 0
        if self.required is not None:
            self.required.begin(index)

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Keeps these rows, in this order."""
        self.rows = [self.rows[row] for row in rows]
        self.totals, self.ages = self.totals[index], self.ages[index]
        if self.required is not None:
            self.required.select(index)

    def choose(self, logits: Tensor, history: TokenHistory | None) -> tuple[Tensor, Tensor]:
        """The next tokens of the beams and the beams that they follow: logits (R * G, V) -> two of (R, G)."""
        beams, vocab = self.decoding.beam, logits.shape[-1]
        logprobs = logits.log_softmax(-1)
        scores = logprobs if history is None else history.constrain(logprobs.clone(), self.eos_id)
        if self.required is not None:
            room = self.limits.limit - (self.ages - len(self.prefix)) - 1
            scores = self.required.constrain(scores.clone() if history is None else scores, room, self.eos_id)
        scores, logprobs = (part.view(len(self.rows), beams, vocab) for part in (scores, logprobs))
        candidates: list[tuple[Tensor, Tensor]] = []
        going: list[tuple[Tensor, Tensor, Tensor]] = []
        for group in range(self.decoding.groups):
            columns = slice(group * self.width, (group + 1) * self.width)
            candidates.append(self._candidates(scores[:, columns], logprobs[:, columns], group, going))
            going.append(self._going(*candidates[-1], group, vocab))
        self._unread.append((candidates, vocab))
        tokens, parents, totals = (torch.cat(parts, 1) for parts in zip(*going, strict=True))
        tokens, parents = self._take(tokens, parents, totals)
        if self.required is not None:
            self.required.append(tokens, parents)
        return tokens, parents

    def collect(self, known: Collection[int]) -> list[tuple[int, list[Hypothesis]]]:
        """The rows that have newly ended, those not known of, with their texts. Waits for the device."""
        self._read()
        ended = (place for place, row in enumerate(self.rows) if row.ended and place not in known)
        return [(place, self.rows[place].hypotheses()) for place in ended]

    def written(self, row: int) -> tuple[()]:
        """Nothing: any beam may be dropped until the search ends."""
        return ()

    def _candidates(
        self, scores: Tensor, logprobs: Tensor, group: int, before: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor]:
        """The best continuations of one group of each image.

        Args:
            before: Tokens, parents and totals of the groups before it at this step.
        Shapes:
            scores and logprobs (R, W, V) -> places (R, 2W), beam * V + token; values (3, R, 2W): totals,
            log-probabilities and what candidates are ranked by
        """
        columns, vocab = slice(group * self.width, (group + 1) * self.width), scores.shape[-1]
        totals = scores + self.totals[:, columns, None]
        ranked = self._less_alike(totals, before)
        places = best(ranked.flatten(1), min(2, vocab) * self.width)
        if self.required is None:
            return places, torch.stack([part.flatten(1).gather(1, places) for part in (totals, logprobs, ranked)])
        places, new = self._with_required(self.required, places, columns, vocab)
        values = torch.stack([part.flatten(1).gather(1, places) for part in (totals, logprobs, ranked)])
        return places, torch.where(new, values, -torch.inf)

    def _less_alike(self, totals: Tensor, before: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Totals less the diversity penalty for each beam of an earlier group that took the token at this step."""
        if not before or not self.decoding.diversity:
            return totals
        counts = totals.new_zeros(totals.shape[0], totals.shape[2])
        for tokens, _, sums in before:
            counts.scatter_add_(1, tokens, (sums > -torch.inf) * self.decoding.diversity)
        return totals - counts[:, None]

    def _going(self, places: Tensor, values: Tensor, group: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and totals of the first W candidates that do not end the text: three of (R, W).

        With W = 2:

            candidates, best first     cat    END    dog    fox
            go on                       x      -      x      x
            order                       0    4 + 1    2      3      the two smallest: cat, dog
        """
        tokens, parents = places % vocab, places // vocab + group * self.width
        goes_on = (tokens != self.eos_id) & (values[2] > -torch.inf)
        order = torch.arange(places.shape[1], device=places.device)
        if self.required is not None:
            order = self._shared_out(self.required, tokens, parents, torch.where(goes_on, values[0], -torch.inf))
        order = torch.where(goes_on, order, order + LAST).topk(self.width, largest=False).indices
        goes_on, tokens, parents, totals = (part.gather(1, order) for part in (goes_on, tokens, parents, values[0]))
        return tokens * goes_on, parents * goes_on, torch.where(goes_on, totals, -torch.inf)

    def _shared_out(self, required: RequiredWords, tokens: Tensor, parents: Tensor, totals: Tensor) -> Tensor:
        """Places of candidates in an order by which the first W hold as many of each bank, as `BeamRow` has it.

        A bank holds those with as many required tokens. Its best one comes with the best ones of the others:

            candidates, by total     a    b    c    d    e
            bank                     0    0    1    0    1
            place in the bank        0    1    0    2    1       order: c a, e b, d

        Shapes:
            tokens, parents and totals (R, n) -> (R, n)
        """
        bank = required.progress(*required.after(tokens, parents))
        place = torch.arange(tokens.shape[1], device=tokens.device)
        before = totals[:, :, None] > totals[:, None]  # whether one comes before another
        before = before | ((totals[:, :, None] == totals[:, None]) & (place[:, None] < place))
        rank = (before & (bank[:, :, None] == bank[:, None])).sum(1)
        return rank * (required.lengths.sum() + 1) - bank

    def _take(self, tokens: Tensor, parents: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the totals over and counts the step; within the prefix, beams stay and its tokens replace theirs."""
        if self.prefix:
            within = (self.ages < len(self.prefix))[:, None]
            forced = self.forced[self.ages.clamp(max=len(self.prefix) - 1)][:, None]
            own = torch.arange(self.decoding.beam, device=tokens.device)
            tokens, parents = torch.where(within, forced, tokens), torch.where(within, own, parents)
            totals = torch.where(within, self.totals, totals)
        self.totals = totals
        self.ages += 1
        return tokens, parents

    def _read(self) -> None:
        """Takes candidates over from the device."""
        for groups, vocab in self._unread:
            lists = [(places.tolist(), values.tolist()) for places, values in groups]
            for place, row in enumerate(self.rows):
                row.step([(places[place], *(part[place] for part in values)) for places, values in lists], vocab)
        self._unread = []

    def _with_required(
        self, required: RequiredWords, places: Tensor, columns: slice, vocab: int
    ) -> tuple[Tensor, Tensor]:
        """Places of the best continuations and those that required words ask for, and whether each is new: (R, n)."""
        wanted, tokens = required.wanted()[:, columns], required.tokens
        if 0 <= self.eos_id < vocab:
            wanted = torch.cat([wanted, required.met[:, columns].all(-1, keepdim=True)], 2)
            tokens = torch.cat([tokens, tokens.new_full((1,), self.eos_id)])
        first = vocab * torch.arange(self.width, device=places.device)[:, None]
        asked = (first + tokens).flatten().expand(len(places), -1)
        new = wanted.flatten(1) & (asked[:, :, None] != places[:, None]).all(2)
        return torch.cat([places, asked], 1), torch.cat([torch.ones_like(places, dtype=torch.bool), new], 1)


def best(scores: Tensor, count: int) -> Tensor:
    """Places of the largest scores of each row, best first.

    torch's own selection copies every score beside its place and compares them one by one. The best lie in the parts
    with the largest maxima, which take one pass to find:

        parts      2 9 4 | 1 0 1 | 7 8 3 | 5 5 6         count = 2
        maxima       9       1       8       6           the parts of 9 and 8 hold the two best
        best         9               8

    Shapes:
        scores (R, M) -> (R, count)
    """
    size = part_size(scores.shape[1])
    if size < SMALL_PART or scores.shape[1] < 2 * size * count:
        return scores.topk(count).indices
    parts = scores.unflatten(1, (-1, size))  # (R, M / size, size)
    chosen = parts.amax(2).topk(count).indices
    near = parts.gather(1, chosen[..., None].expand(-1, -1, size)).flatten(1).topk(count).indices
    return chosen.gather(1, near // size) * size + near % size


@cache
def part_size(size: int) -> int:
    """The largest number up to 128 that divides a row's length."""
    return max(part for part in range(1, 129) if size % part == 0)
