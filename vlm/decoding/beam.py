"""Beam search, exact in when it ends, with groups of beams that avoid each other and words that texts must hold."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from vlm.decoding.beam_row import BeamLimits, BeamRow
from vlm.decoding.constraints import keep_possible, missing, next_tokens
from vlm.decoding.options import Decoding, Hypothesis
from vlm.decoding.token_history import TokenHistory


class Beam:
    """Beam search, with diverse groups (Vijayakumar et al. 2018, algorithm 1) and words that texts must hold.

    At each step the 2W best continuations of the W beams of each of an image's groups are candidates: those among the
    first W that end the text are finished, and the W best that do not end it go on. That is Hugging Face's search with
    early_stopping="never", but that an image is done as soon as nothing can come among its results any more.

    Beams go on without a word from the host:

        device, each step       logits -> candidates -> the W best that do not end: totals, tokens, parents
                                              |
        host, in `settle`                     +-------> BeamRow: a tree of nodes, finished texts, the end of the search

    With required words, candidates also are the tokens that bring each beam further in them and the end of texts that
    hold them, and the host chooses the beams that go on, so that it reads each step.

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
        self.prefix, self.required = decoding.rules.prefix, decoding.rules.required
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

    def replace(self, rows: Sequence[int], index: Tensor, ids: Sequence[int | str]) -> None:
        """Gives rows to other images; index holds the same rows on the device."""
        for row in rows:
            self.rows[row] = BeamRow.begin(self.limits)
        self.totals[index] = self.first
        self.ages[index] = 0

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Keeps these rows, in this order."""
        self.rows = [self.rows[row] for row in rows]
        self.totals, self.ages = self.totals[index], self.ages[index]

    def choose(self, logits: Tensor, history: TokenHistory | None) -> tuple[Tensor, Tensor]:
        """The next tokens of the beams and the beams that they follow: logits (R * G, V) -> two of (R, G)."""
        beams, vocab = self.decoding.beam, logits.shape[-1]
        logprobs = logits.log_softmax(-1)
        scores = logprobs if history is None else history.constrain(logprobs.clone(), self.eos_id)
        if self.required:
            scores = scores.clone() if history is None else scores
            for place, row in enumerate(self.rows):
                self._require(scores[place * beams : (place + 1) * beams], row)
        scores, logprobs = (part.view(len(self.rows), beams, vocab) for part in (scores, logprobs))
        candidates: list[tuple[Tensor, Tensor]] = []
        going: list[tuple[Tensor, Tensor, Tensor]] = []
        for group in range(self.decoding.groups):
            columns = slice(group * self.width, (group + 1) * self.width)
            candidates.append(self._candidates(scores[:, columns], logprobs[:, columns], group, going))
            going.append(self._going(*candidates[-1], group, vocab))
        self._unread.append((candidates, vocab))
        if self.required:
            self._read()
            return self._chosen_by_host(logits.device)
        tokens, parents, totals = (torch.cat(parts, 1) for parts in zip(*going, strict=True))
        return self._force(tokens, parents, totals)

    def settle(self, known: Collection[int]) -> list[tuple[int, list[Hypothesis]]]:
        """The rows that have ended, but for those known of, with their texts. Waits for the device."""
        self._read()
        ended = (place for place, row in enumerate(self.rows) if row.ended and place not in known)
        return [(place, self.rows[place].hypotheses()) for place in ended]

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
        places = ranked.flatten(1).topk(min(2, vocab) * self.width).indices
        if self.required:
            places = self._with_required(places, group, vocab)
        return places, torch.stack([part.flatten(1).gather(1, places) for part in (totals, logprobs, ranked)])

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
        order = torch.where(goes_on, order, order + places.shape[1]).topk(self.width, largest=False).indices
        goes_on, tokens, parents, totals = (part.gather(1, order) for part in (goes_on, tokens, parents, values[0]))
        return tokens * goes_on, parents * goes_on, torch.where(goes_on, totals, -torch.inf)

    def _force(self, tokens: Tensor, parents: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps the beams of texts within the prefix, with the prefix in the place of their tokens."""
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

    def _chosen_by_host(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """As `_force`, from the nodes of each row."""
        tokens, parents, totals = [], [], []
        for row in self.rows:
            within = row.age <= len(self.prefix)  # the step is counted already
            nodes = [0 if node is None else max(node.token, 0) for node in row.beams]
            tokens.append([self.prefix[row.age - 1]] * len(row.beams) if within else nodes)
            parents.append(list(range(len(row.beams))) if within else list(row.parents))
            totals.append([-torch.inf if node is None else node.total for node in row.beams])
        self.totals = torch.tensor(totals, device=device)
        return torch.tensor(tokens, device=device), torch.tensor(parents, device=device)

    def _require(self, scores: Tensor, row: BeamRow) -> None:
        if not row.in_prefix:
            texts = [[] if node is None else row.text(node) for node in row.beams]
            room = self.limits.limit - (row.age - len(self.prefix)) - 1
            keep_possible(scores, texts, self.required, room, self.eos_id)

    def _with_required(self, places: Tensor, group: int, vocab: int) -> Tensor:
        """Places of the best continuations, and of those that required words ask for."""
        rows = places.tolist()
        for row, chosen in zip(self.rows, rows, strict=True):
            for beam, node in enumerate(row.group(group)):
                if node is not None:
                    text = row.text(node)
                    lacking = missing(text, self.required)
                    wanted = next_tokens(text, lacking) if lacking else {self.eos_id} & set(range(vocab))
                    chosen += [beam * vocab + token for token in sorted(wanted)]
        longest = max(map(len, rows), default=0)
        return torch.tensor([row + row[:1] * (longest - len(row)) for row in rows], device=places.device)
