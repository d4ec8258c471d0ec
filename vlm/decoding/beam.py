"""Beam search, exact in when it ends, with groups of beams that avoid each other and words that texts must hold."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vlm.decoding.options import Decoding, Hypothesis
from vlm.decoding.required import keep_possible, missing, next_tokens, progress
from vlm.decoding.token_history import Texts


@dataclass(eq=False)
class Node:
    """A hypothesis: a token, and the hypothesis that it follows.

    Args:
        total: Sum of the scores, by which hypotheses of one length are ranked.
        logprob: What the model gave the token, before any rule.
        depth: Number of tokens.
        kept: Whether it was finished or went on.
    """

    parent: "Node | None"
    token: int
    total: float
    logprob: float
    depth: int
    kept: bool = False

    def path(self) -> list["Node"]:
        """The nodes from the first token to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def tokens(self) -> list[int]:
        return [node.token for node in self.path()]


@dataclass
class _Row:
    """The search for an image's texts.

    Args:
        beams: None where there are fewer hypotheses than beams.
        came: Which beam each of these follows.
        finished: For each group, best first.
        taken: For each group, the tokens at this step of the hypotheses that do not end.
        tree: Every candidate of each step, if traced.
    """

    beams: list[Node | None]
    came: list[int]
    finished: list[list[tuple[float, Node]]]
    taken: list[list[int]]
    age: int = 0
    ended: bool = False
    tree: list[list[Node]] = field(default_factory=list)


class Beam:
    """Beam search, with diverse groups (Vijayakumar et al. 2018, algorithm 1) and words that texts must hold.

    At each step the 2G best continuations of an image's G beams are looked at: those among the first G that end the
    text are finished, and the G best that do not end it go on. That is Hugging Face's search with
    early_stopping="never", but that an image is done as soon as nothing can come among its results any more.

    With required words, candidates also are the tokens that bring each beam further in them and the end of texts that
    hold them, and the beams are shared out among the banks of how far they have come (Post and Vilar 2018).

    Args:
        steps: Tokens that may be chosen for a text, the end token counted.
        limit: Tokens at which a text is cut that did not end.
        traced: Whether every candidate of each step is kept.
    """

    def __init__(self, decoding: Decoding, *, steps: int, limit: int, eos_id: int, traced: bool = False) -> None:
        self.decoding, self.steps, self.limit, self.eos_id = decoding, steps, limit, eos_id
        self.prefix, self.required, self.traced = decoding.rules.prefix, decoding.rules.required, traced
        self.width = decoding.beam // decoding.groups
        self.rows: list[_Row] = []

    def begin(self, id: int | str) -> _Row:
        groups, beams = self.decoding.groups, self.decoding.beam
        first: list[Node | None] = [Node(None, -1, 0.0, 0.0, 0), *[None] * (self.width - 1)]
        return _Row(first * groups, list(range(beams)), [[] for _ in range(groups)], [[] for _ in range(groups)])

    def choose(self, logits: Tensor, texts: Texts | None) -> tuple[Tensor, Tensor]:
        """The next tokens of the beams and which beams they follow: logits (R * G, V) -> two of (R, G)."""
        beams = self.decoding.beam
        logprobs = logits.log_softmax(-1)
        scores = logprobs if texts is None else texts.rule(logprobs.clone(), self.eos_id)
        if self.required:
            scores = scores.clone() if texts is None else scores
            for place, row in enumerate(self.rows):
                self._require(scores[place * beams : (place + 1) * beams], row)
        scores, logprobs = (part.view(len(self.rows), beams, -1) for part in (scores, logprobs))  # (R, G, V)
        for group in range(self.decoding.groups):
            columns = slice(group * self.width, (group + 1) * self.width)
            self._advance(scores[:, columns], logprobs[:, columns], group)
        return self._next(logits.device)

    def settle(self, known: Collection[int]) -> list[tuple[int, list[Hypothesis]]]:
        """The rows that have ended, but for those known of, with their texts."""
        ended = (place for place, row in enumerate(self.rows) if row.ended and place not in known)
        return [(place, self._hypotheses(self.rows[place])) for place in ended]

    def _advance(self, scores: Tensor, logprobs: Tensor, group: int) -> None:
        """A step of one group of each image: scores (R, W, V), and what they were before the rules."""
        sums = [[-torch.inf if node is None else node.total for node in self._beams(row, group)] for row in self.rows]
        totals = scores + torch.tensor(sums, device=scores.device)[..., None]
        ranked = self._less_alike(totals, group)
        vocab = scores.shape[-1]
        places = ranked.flatten(1).topk(min(2, vocab) * self.width).indices  # (R, 2W)
        if self.required:
            places = self._with_required(places, group, vocab)
        found = [part.flatten(1).gather(1, places).tolist() for part in (totals, logprobs, ranked)]
        for row, *options in zip(self.rows, places.tolist(), *found, strict=True):
            if row.age >= len(self.prefix) and not row.ended:
                self._grow(row, group, self._candidates(row, group, vocab, *options))

    def _beams(self, row: _Row, group: int) -> list[Node | None]:
        return row.beams[group * self.width : (group + 1) * self.width]

    def _candidates(
        self, row: _Row, group: int, vocab: int, places: list[int], *values: list[float]
    ) -> list[tuple[Node, int]]:
        """What may follow, each with the beam that it follows."""
        beams, found = self._beams(row, group), {}
        for place, total, logprob, rank in zip(places, *values, strict=True):
            parent = beams[place // vocab]
            if parent is not None and rank > -torch.inf and place not in found:
                node = Node(parent, place % vocab, total, logprob, parent.depth + 1)
                found[place] = (node, group * self.width + place // vocab)
        return list(found.values())

    def _grow(self, row: _Row, group: int, candidates: list[tuple[Node, int]]) -> None:
        """Finishes and keeps hypotheses of a group."""
        row.taken[group] = [node.token for node, _ in candidates if node.token != self.eos_id][: self.width]
        last = row.age - len(self.prefix) + 1 == self.steps
        finished, going = row.finished[group], []
        for rank, (node, beam) in enumerate(candidates):
            if not (last or node.token == self.eos_id):
                going.append((node, beam))
            elif rank < self.width or self.required:
                finished.append((node.total / node.depth**self.decoding.length_penalty, node))
                node.kept = True
        alive = [node for node in self._beams(row, group) if node is not None]
        if alive and not candidates and not finished:  # the rules leave no token: the best beam is cut here
            finished.append((-torch.inf, alive[0]))
        finished.sort(key=lambda pair: -pair[0])
        del finished[self.width :]
        going = self._share_out(going)[: self.width]
        for node, _ in going:
            node.kept = True
        spare, columns = self.width - len(going), slice(group * self.width, (group + 1) * self.width)
        row.beams[columns] = [*(node for node, _ in going), *[None] * spare]
        row.came[columns] = [*(beam for _, beam in going), *[0] * spare]
        if self.traced:
            row.tree.append([node for node, _ in candidates])

    def _decided(self, row: _Row, group: int) -> bool:
        """Whether no continuation of a group's beams can come among the results.

        Scores only fall as a text grows, so that what a beam may come to is bounded by its total over the greatest
        length, where that makes most of it, or over the next one.
        """
        going = [node for node in self._beams(row, group) if node is not None]
        finished, wanted = row.finished[group], min(self.decoding.results, self.width)
        if not going or len(finished) < wanted or not self.decoding.prune:
            return not going
        alpha = self.decoding.length_penalty
        length = self.steps if alpha > 0 else going[0].depth + 1
        return max(node.total for node in going) / length**alpha <= finished[wanted - 1][0]

    def _next(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens that the model reads next, and the places of the beams that they follow."""
        tokens, parents = [], []
        for row in self.rows:
            if row.age < len(self.prefix):
                tokens.append([self.prefix[row.age]] * len(row.beams))
                parents.append(list(range(len(row.beams))))
            else:
                # Groups are decided together, for what one keeps bears on those after it.
                row.ended = row.ended or all(self._decided(row, group) for group in range(self.decoding.groups))
                tokens.append([0 if node is None else max(node.token, 0) for node in row.beams])
                parents.append(list(row.came))
            row.age += 1
        return torch.tensor(tokens, device=device), torch.tensor(parents, device=device)

    def _less_alike(self, totals: Tensor, group: int) -> Tensor:
        """Totals less the diversity penalty for each beam of an earlier group that took the token at this step."""
        if not group or not self.decoding.diversity:
            return totals
        taken = totals.new_zeros(totals.shape[0], totals.shape[2])
        for counts, row in zip(taken, self.rows, strict=True):
            for tokens in row.taken[:group]:
                for token in tokens:
                    counts[token] += self.decoding.diversity
        return totals - taken[:, None]

    def _hypotheses(self, row: _Row) -> list[Hypothesis]:
        finished = sorted((pair for group in row.finished for pair in group), key=lambda pair: -pair[0])
        found: dict[tuple[int, ...], Hypothesis] = {}  # texts that were cut may be the same
        for score, node in finished:
            path = node.path()
            path = path if node.token == self.eos_id else path[: self.limit]
            tokens = [step.token for step in path]
            found.setdefault(tuple(tokens), Hypothesis(tokens, [step.logprob for step in path], score))
        return list(found.values())[: self.decoding.results]

    def _require(self, scores: Tensor, row: _Row) -> None:
        if row.age >= len(self.prefix):
            texts = [[] if node is None else [*self.prefix, *node.tokens()] for node in row.beams]
            room = self.limit - (row.age - len(self.prefix)) - 1
            keep_possible(scores, texts, self.required, room, self.eos_id)

    def _with_required(self, places: Tensor, group: int, vocab: int) -> Tensor:
        """Places of the best continuations, and of those that required words ask for."""
        rows = places.tolist()
        for row, chosen in zip(self.rows, rows, strict=True):
            for beam, node in enumerate(self._beams(row, group)):
                if node is not None:
                    text = [*self.prefix, *node.tokens()]
                    lacking = missing(text, self.required)
                    wanted = next_tokens(text, lacking) if lacking else {self.eos_id} & set(range(vocab))
                    chosen += [beam * vocab + token for token in sorted(wanted)]
        longest = max(map(len, rows), default=0)
        return torch.tensor([row + row[:1] * (longest - len(row)) for row in rows], device=places.device)

    def _share_out(self, going: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
        """Orders hypotheses so that the first W hold as many of each bank, where there are that many."""
        if not self.required:
            return going
        banks: dict[int, list[tuple[Node, int]]] = {}
        for pair in sorted(going, key=lambda pair: -pair[0].total):
            banks.setdefault(progress([*self.prefix, *pair[0].tokens()], self.required), []).append(pair)
        columns = [banks[bank] for bank in sorted(banks, reverse=True)]
        return [bank[n] for n in range(max(map(len, columns), default=0)) for bank in columns if n < len(bank)]
