"""The host side of the beam search of one input: a tree of hypotheses, and its export for display."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from vlm.decoding.constraints import count_required_tokens
from vlm.decoding.options import Decoding, Hypothesis


@dataclass(eq=False)
class Node:
    """A hypothesis: a token and its parent hypothesis.

    Args:
        total: Sum of the scores, which ranks hypotheses of equal length.
        logprob: Log-probability of the token according to the model, before any constraint.
        depth: Number of tokens.
        selected: Whether the hypothesis was finished or continued.
    """

    parent: "Node | None"
    token: int
    total: float
    logprob: float
    depth: int
    selected: bool = False

    def path(self) -> list["Node"]:
        """The nodes from the first token to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def tokens(self) -> list[int]:
        return [node.token for node in self.path()]


@dataclass(frozen=True, kw_only=True)
class BeamLimits:
    """Options that the searches of all inputs share.

    Args:
        steps: Maximum number of tokens chosen for a text, end token included.
        limit: Number of tokens at which an unfinished text is cut.
        ends: Tokens that end a text.
        traced: Whether to store all candidates of each step.
    """

    decoding: Decoding
    steps: int
    limit: int
    ends: tuple[int, ...]
    traced: bool = False

    @property
    def width(self) -> int:
        """Number W of beams per group."""
        return self.decoding.beam // self.decoding.groups

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.decoding.rules.prefix


# The candidates of a group at a step, best first: places (beam * V + token), totals, log-probabilities and ranks.
Candidates = Sequence[Sequence[float]]


@dataclass
class BeamRow:
    """The search for the texts of one input.

    Args:
        beams: The continuing hypotheses; None for missing ones.
        finished: Scores and hypotheses of each group, best first.
        age: Number of steps taken, the prefix included.
        tree: All candidates of each step, if traced.
    """

    limits: BeamLimits
    beams: list[Node | None]
    finished: list[list[tuple[float, Node]]]
    age: int = 0
    ended: bool = False
    tree: list[list[Node]] = field(default_factory=list)

    @classmethod
    def begin(cls, limits: BeamLimits) -> "BeamRow":
        groups = limits.decoding.groups
        first: list[Node | None] = [Node(None, -1, 0.0, 0.0, 0), *[None] * (limits.width - 1)]
        return cls(limits, first * groups, [[] for _ in range(groups)])

    @property
    def in_prefix(self) -> bool:
        return self.age < len(self.limits.prefix)

    def group(self, number: int) -> list[Node | None]:
        return self.beams[number * self.limits.width : (number + 1) * self.limits.width]

    def text(self, node: Node) -> list[int]:
        return [*self.limits.prefix, *node.tokens()]

    def step(self, groups: Sequence[Candidates], vocab: int) -> None:
        """Processes the candidates of one step, group by group."""
        if not self.in_prefix and not self.ended:
            for number, candidates in enumerate(groups):
                self._update_group(number, self._create_nodes(number, candidates, vocab))
            # Groups end together, because the tokens of one affect the later ones.
            self.ended = all(self._is_group_done(number) for number in range(len(groups)))
        self.age += 1

    def _create_nodes(self, group: int, candidates: Candidates, vocab: int) -> list[Node]:
        """Converts candidates to nodes."""
        beams, nodes = self.group(group), {}
        for place, total, logprob, rank in zip(*candidates, strict=True):
            beam, token = divmod(int(place), vocab)
            parent = beams[beam]
            if parent is not None and rank > float("-inf") and place not in nodes:
                nodes[place] = Node(parent, token, total, logprob, parent.depth + 1)
        return list(nodes.values())

    def _update_group(self, group: int, candidates: list[Node]) -> None:
        """Finishes and continues hypotheses of a group."""
        limits, width = self.limits, self.limits.width
        last, required = self.age - len(limits.prefix) + 1 == limits.steps, limits.decoding.rules.required
        continuing = [] if last else [node for node in candidates if node.token not in limits.ends]
        if last and limits.steps > limits.limit:
            ended = self._cut_at_limit(group, candidates)
        else:
            ranked = [node for rank, node in enumerate(candidates) if rank < width or required]
            ended = [node for node in ranked if last or node.token in limits.ends]
        finished = self.finished[group]
        for node in ended:
            finished.append((node.total / max(1, node.depth) ** limits.decoding.length_penalty, node))
            node.selected = True
        active = [node for node in self.group(group) if node is not None]
        if active and not candidates and not finished:  # the constraints allow no token: cut the best beam
            finished.append((float("-inf"), active[0]))
        finished.sort(key=lambda pair: -pair[0])
        del finished[width:]
        continuing = self._interleave_banks(continuing)[:width]
        for node in continuing:
            node.selected = True
        spare, columns = width - len(continuing), slice(group * width, (group + 1) * width)
        self.beams[columns] = [*continuing, *[None] * spare]
        if limits.traced:
            self.tree.append(candidates)

    def _cut_at_limit(self, group: int, candidates: list[Node]) -> list[Node]:
        """Returns a group's texts at the length limit: with the end token if it is the most probable, else without."""
        best: dict[int, Node] = {}
        for node in candidates:
            best.setdefault(id(node.parent), node)
        texts = []
        for node in (node for node in self.group(group) if node is not None):
            after = best.get(id(node))
            texts.append(after if after is not None and after.token in self.limits.ends else node)
        return texts

    def _interleave_banks(self, continuing: list[Node]) -> list[Node]:
        """Orders hypotheses so that the first W are spread equally over the banks.

        A bank holds the hypotheses with equal progress in the required words (Post and Vilar 2018).
        """
        required = self.limits.decoding.rules.required
        if not required:
            return continuing
        banks: dict[int, list[Node]] = {}
        for node in sorted(continuing, key=lambda node: -node.total):
            banks.setdefault(count_required_tokens(self.text(node), required), []).append(node)
        columns = [banks[bank] for bank in sorted(banks, reverse=True)]
        return [bank[n] for n in range(max(map(len, columns), default=0)) for bank in columns if n < len(bank)]

    def _is_group_done(self, group: int) -> bool:
        """Returns True if no continuation of a group's beams can enter the results.

        Scores only decrease as a text grows. A beam's best possible score is therefore bounded by its total over the
        maximum length, or over the next length if the penalty makes that larger. Unless early_stopping is "never", a
        group is done when it has as many finished texts as beams and, for False, no beam would rank higher now.
        """
        decoding = self.limits.decoding
        continuing = [node for node in self.group(group) if node is not None]
        finished, results = self.finished[group], min(decoding.results, self.limits.width)
        if decoding.early_stopping != "never":
            if not continuing or len(finished) < self.limits.width:
                return not continuing
            best = max(node.total for node in continuing) / continuing[0].depth ** decoding.length_penalty
            return decoding.early_stopping is True or best <= finished[-1][0]
        if not continuing or len(finished) < results or not decoding.prune:
            return not continuing
        alpha = decoding.length_penalty
        length = self.limits.steps if alpha > 0 else continuing[0].depth + 1
        return max(node.total for node in continuing) / length**alpha <= finished[results - 1][0]

    def hypotheses(self) -> list[Hypothesis]:
        """The texts of the input, best first."""
        finished = sorted((pair for group in self.finished for pair in group), key=lambda pair: -pair[0])
        texts: dict[tuple[int, ...], Hypothesis] = {}  # two groups may find the same text
        for score, node in finished:
            path = node.path()
            tokens = [step.token for step in path]
            texts.setdefault(tuple(tokens), Hypothesis(tokens, [step.logprob for step in path], score))
        return list(texts.values())[: self.limits.decoding.results]


class NodeRecord(TypedDict):
    """A node of a search as plain values, see `as_json`."""

    id: int
    parent: int | None
    step: int
    token: str
    logprob: float
    total: float
    kept: bool


def as_json(tree: Sequence[Sequence[Node]], piece: Callable[[int], str]) -> dict[str, list[NodeRecord]]:
    """The search as plain containers: all candidates, step by step.

    Args:
        tree: The candidates of each step, from `decode`.
        piece: Returns the printable form of a token.
    Returns:
        nodes, each with id, parent (its id, None for a first token), step, token, logprob (according to the model),
        total (score of the whole hypothesis) and kept (whether it was finished or continued).
    """
    numbers: dict[int, int] = {}
    nodes: list[NodeRecord] = []
    for node in (node for step in tree for node in step):
        numbers[id(node)] = len(nodes)
        nodes.append(
            {
                "id": len(nodes),
                "parent": numbers.get(id(node.parent)),
                "step": node.depth,
                "token": piece(node.token),
                "logprob": node.logprob,
                "total": node.total,
                "kept": node.selected,
            }
        )
    return {"nodes": nodes}
