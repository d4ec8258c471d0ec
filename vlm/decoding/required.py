"""Required words: which of them a text contains, and the tokens that it still needs.

The functions work on one text, on the host. `RequiredWords` tracks many texts on the device without synchronising.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlm.decoding.constraints import Required, Words, within


def missing(text: Sequence[int], required: Required) -> list[Sequence[Words]]:
    """The requirements that a text does not meet yet."""
    return [ways for ways in required if not any(_holds(text, words) for words in ways)]


def room_needed(text: Sequence[int], lacking: Required) -> int:
    """Number of tokens still needed: the rest of the requirement that the text is in the middle of, and all others.

    Tokens shared by two requirements are counted twice.
    """
    whole = [min(map(len, ways)) for ways in lacking]
    saved = [full - min(len(rest(text, words)) for words in ways) for full, ways in zip(whole, lacking, strict=True)]
    return sum(whole) - max(0, max(saved, default=0))


def next_tokens(text: Sequence[int], lacking: Required) -> set[int]:
    """Tokens that begin or continue a missing requirement."""
    return {words[0] for ways in lacking for way in ways for words in (rest(text, way), way)}


def progress(text: Sequence[int], required: Required) -> int:
    """Number of required tokens that a text contains: its bank (Post and Vilar 2018)."""
    return sum(min(map(len, ways)) for ways in required) - room_needed(text, missing(text, required))


def rest(text: Sequence[int], words: Words) -> Words:
    """The words that must still follow a text, which may end in the middle of them."""
    for count in range(min(len(words) - 1, len(text)), 0, -1):
        if tuple(text[-count:]) == words[:count]:
            return words[count:]
    return words


def _holds(text: Sequence[int], words: Words) -> bool:
    return any(tuple(text[at : at + len(words)]) == words for at in range(len(text) - len(words) + 1))


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
        ways = [way for each in required for way in each]
        runs = sorted({way[:count] for way in ways for count in range(len(way) + 1)}, key=lambda run: (len(run), run))
        tokens = sorted({token for way in ways for token in way})
        number = {run: place for place, run in enumerate(runs)}

        def follow(run: Words, token: int) -> int:
            longer = (*run, token)
            return next(number[longer[at:]] for at in range(len(longer) + 1) if longer[at:] in number)

        def left(run: Words, each: Sequence[Words]) -> int:
            return min(len(rest(run, way)) for way in each)

        self.tokens = torch.tensor(tokens, device=device)
        self.lengths = torch.tensor([min(map(len, each)) for each in required], device=device)
        self.goto = torch.tensor([[*(follow(run, token) for token in tokens), 0] for run in runs], device=device)
        meets = [[any(run[-len(way) :] == way for way in each) for each in required] for run in runs]
        self.meets = torch.tensor(meets, device=device)
        short = [[left(run, each) for each in required] for run in runs]
        self.saved = self.lengths - torch.tensor(short, device=device)
        useful = [[[token in next_tokens(run, [each]) for token in tokens] for each in required] for run in runs]
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
        own = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self.node, self.met = self.after(tokens, own if parents is None else parents)

    def after(self, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Node and met requirements after one more token: tokens and parents (R, n) -> (R, n), (R, n, M)."""
        same = tokens[..., None] == self.tokens
        letter = torch.where(same.any(-1), same.int().argmax(-1), len(self.tokens))
        node = self.goto[self.node.gather(1, parents), letter]
        met = self.met.gather(1, parents[..., None].expand(-1, -1, self.met.shape[2]))
        return node, met | self.meets[node]

    def needed(self, node: Tensor, met: Tensor) -> Tensor:
        """Like `room_needed`: node (...), met (..., M) -> (...)."""
        lacking = ~met
        return (self.lengths * lacking).sum(-1) - (self.saved[node] * lacking).amax(-1)

    def progress(self, node: Tensor, met: Tensor) -> Tensor:
        """Like the function `progress`."""
        return self.lengths.sum() - self.needed(node, met)

    def wanted(self) -> Tensor:
        """The tokens that begin or continue a missing requirement of each text: bool (R, G, K)."""
        return (self.useful[self.node] & ~self.met[..., None]).any(2)

    def constrain(self, scores: Tensor, room: Tensor, ends: Sequence[int]) -> Tensor:
        """Masks scores in place, with -inf, for tokens after which the missing requirements no longer fit.

        Args:
            room: Number of tokens that may follow the next one, end token excluded.
        Shapes:
            scores (R * G, V), room (R,)
        """
        left = room[:, None].expand_as(self.node)
        for end in within(ends, scores.shape[1]):
            scores[:, end].masked_fill_(~self.met.all(-1).flatten(), -torch.inf)
        lacking = (self.lengths * ~self.met).sum(-1)
        tight = ((lacking > left) & (lacking > 0)).flatten()[:, None]  # (R * G, 1)
        node = self.goto[self.node][..., :-1]  # (R, G, K)
        fits = self.needed(node, self.met[:, :, None] | self.meets[node]) <= left[..., None]
        useful = (self.wanted() & fits).flatten(0, 1)
        kept = scores[:, self.tokens].masked_fill(tight & ~useful, -torch.inf)
        scores.masked_fill_(tight, -torch.inf)
        scores[:, self.tokens] = kept
        return scores
