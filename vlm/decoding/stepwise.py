"""Choosing one token a text: the most probable one, or one drawn."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vlm.decoding.constraints import allow_end
from vlm.decoding.options import Decoding, Hypothesis
from vlm.decoding.required import keep_possible
from vlm.decoding.token_history import Texts
from vlm.randomness import numpy_rng


@dataclass
class _Row:
    """The texts of an image: a list a column each."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    draws: np.ndarray | None
    age: int = 0  # steps since the row began
    read: int = 0  # of these, how many the host has seen
    ended: list[bool] = field(default_factory=list)


class Single:
    """Greedy search and sampling. What was chosen is read by the host only in `settle`, which may wait.

    Args:
        steps: Tokens that may be chosen for a text, the end token counted.
        limit: Tokens at which a text is cut that did not end.
    """

    def __init__(self, decoding: Decoding, *, steps: int, limit: int, eos_id: int) -> None:
        self.decoding, self.steps, self.limit, self.eos_id = decoding, steps, limit, eos_id
        self.prefix = decoding.rules.prefix
        self.rows: list[_Row] = []
        self._unread: list[tuple[Tensor, Tensor | None]] = []

    def begin(self, id: int | str) -> _Row:
        columns, draws = range(self.decoding.columns), None
        if self.decoding.sampling is not None:
            seed = self.decoding.seed
            draws = np.array([numpy_rng(seed, "caption", id, n).random(self.steps) for n in columns])
        return _Row([[] for _ in columns], [[] for _ in columns], draws, ended=[False] * len(columns))

    def choose(self, logits: Tensor, texts: Texts | None) -> tuple[Tensor, None]:
        """The next token of each text: logits (R * G, V) -> (R, G)."""
        columns, sampling = self.decoding.columns, self.decoding.sampling
        raw = logits
        if texts is not None:
            logits = texts.rule(logits.clone(), self.eos_id)
        if self.decoding.rules.required:
            logits = self._require(logits.clone() if texts is None else logits)
        if logits is not raw:
            allow_end(logits, self.eos_id)
        tokens = logits.argmax(-1) if sampling is None else sampling.draw(logits, self._uniform().to(logits.device))
        logprobs = None
        if self.decoding.logprobs:
            logprobs = (raw.gather(1, tokens[:, None])[:, 0] - raw.logsumexp(-1)).view(-1, columns)
        tokens = self._force(tokens.view(-1, columns))
        self._unread.append((tokens, logprobs))
        for row in self.rows:
            row.age += 1
        return tokens, None

    def settle(self, known: Collection[int]) -> list[tuple[int, list[Hypothesis]]]:
        """Reads what was chosen; returns the rows that have ended, but for those known of, with their texts."""
        for tokens, logprobs in self._unread:
            chosen = tokens.tolist()
            logs = None if logprobs is None else logprobs.tolist()
            for place, row in enumerate(self.rows):
                self._read(row, chosen[place], None if logs is None else logs[place])
        self._unread = []
        ended = (place for place, row in enumerate(self.rows) if place not in known and all(row.ended))
        return [(place, self._hypotheses(self.rows[place])) for place in ended]

    def _read(self, row: _Row, tokens: list[int], logprobs: list[float] | None) -> None:
        row.read += 1
        if row.read <= len(self.prefix):
            return
        for column, token in enumerate(tokens):
            if row.ended[column]:
                continue
            row.tokens[column].append(token)
            if logprobs is not None:
                row.logprobs[column].append(logprobs[column])
            row.ended[column] = token == self.eos_id or len(row.tokens[column]) == self.steps

    def _hypotheses(self, row: _Row) -> list[Hypothesis]:
        found = []
        for tokens, logprobs in zip(row.tokens, row.logprobs, strict=True):
            end = len(tokens) if tokens[-1:] == [self.eos_id] else self.limit
            found.append(Hypothesis(tokens[:end], logprobs[:end], sum(logprobs[:end])))
        return found

    def _force(self, tokens: Tensor) -> Tensor:
        """Puts the prefix in the place of what was chosen for texts that are still within it."""
        if not any(row.age < len(self.prefix) for row in self.rows):
            return tokens
        forced = [self.prefix[row.age] if row.age < len(self.prefix) else -1 for row in self.rows]
        fixed = torch.tensor(forced, device=tokens.device)[:, None]
        return torch.where(fixed < 0, tokens, fixed)

    def _uniform(self) -> Tensor:
        # Texts that have ended draw on until the host knows of it.
        at = [min(max(row.age - len(self.prefix), 0), self.steps - 1) for row in self.rows]
        drawn = [row.draws[:, place] for row, place in zip(self.rows, at, strict=True) if row.draws is not None]
        return torch.from_numpy(np.concatenate(drawn))

    def _require(self, logits: Tensor) -> Tensor:
        columns = self.decoding.columns
        for place, row in enumerate(self.rows):
            if row.age >= len(self.prefix):
                texts = [[*self.prefix, *tokens] for tokens in row.tokens]
                part = logits[place * columns : (place + 1) * columns]
                room = self.limit - (row.age - len(self.prefix)) - 1
                keep_possible(part, texts, self.decoding.rules.required, room, self.eos_id)
        return logits
