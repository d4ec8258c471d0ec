"""Greedy search and sampling: one token per text and step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vlm.decoding.constraints import RequiredWords, allow_end, force_end
from vlm.decoding.options import Decoding, Hypothesis
from vlm.decoding.sampling import TokenHistory
from vlm.randomness import numpy_rng


@dataclass
class _Row:
    """The texts of an input, one list per column."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    age: int = 0  # number of steps that the host has read
    ended: list[bool] = field(default_factory=list)


class StepwiseSearch:
    """Greedy search and sampling. The host reads tokens only in `collect`, which may wait for the device.

    Args:
        steps: Maximum number of tokens chosen for a text, end token included.
        limit: Number of tokens at which an unfinished text is cut.
    Shapes:
        draws (R, G, steps): all random numbers of a text; ages (R,): steps taken
    """

    def __init__(self, decoding: Decoding, *, steps: int, limit: int, ends: tuple[int, ...]) -> None:
        self.decoding, self.steps, self.limit, self.ends = decoding, steps, limit, ends
        self.prefix = decoding.rules.prefix
        self.rows: list[_Row] = []
        self.draws: Tensor | None = None
        self.required: RequiredWords | None = None
        self._pending: list[tuple[Tensor, Tensor | None]] = []

    def begin(self, ids: Sequence[int | str], device: torch.device) -> None:
        """Starts texts for these inputs."""
        self.rows = [self._create_row() for _ in ids]
        self.ages = torch.zeros(len(ids), dtype=torch.long, device=device)
        self.forced = torch.tensor(self.prefix, dtype=torch.long, device=device)
        if self.decoding.sampling is not None:
            self.draws = self._draw_uniforms(ids).to(device)
        if words := self.decoding.rules.required:
            self.required = RequiredWords(words, rows=len(ids), beams=self.decoding.columns, device=device)

    def replace(self, rows: Sequence[int], index: Tensor, ids: Sequence[int | str]) -> None:
        """Assigns rows to other inputs; `index` holds the same rows on the device."""
        for row in rows:
            self.rows[row] = self._create_row()
        self.ages[index] = 0
        if self.draws is not None:
            self.draws[index] = self._draw_uniforms(ids).to(index.device)
        if self.required is not None:
            self.required.begin(index)

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Keeps only these rows, in this order."""
        self.rows = [self.rows[row] for row in rows]
        self.ages = self.ages[index]
        self.draws = None if self.draws is None else self.draws[index]
        if self.required is not None:
            self.required.select(index)

    def choose(self, logits: Tensor, history: TokenHistory | None) -> tuple[Tensor, None]:
        """The next token of each text: logits (R * G, V) -> (R, G)."""
        columns, sampling = self.decoding.columns, self.decoding.sampling
        if self.decoding.forced_end:
            logits = force_end(logits, self.ages - len(self.prefix) == self.steps - 1, self.ends[0])
        raw = logits
        if history is not None:
            logits = history.constrain(logits.clone(), self.ends)
        if self.required is not None:
            remaining = self.limit - (self.ages - len(self.prefix)) - 1
            logits = self.required.constrain(logits.clone() if history is None else logits, remaining, self.ends)
        if logits is not raw:
            allow_end(logits, self.ends[0])
        if sampling is None:
            tokens = logits.argmax(-1)
        else:  # finished texts draw until the host reads that they ended
            assert self.draws is not None
            at = (self.ages - len(self.prefix)).clamp(0, self.steps - 1)[:, None, None]
            tokens = sampling.draw(logits, self.draws.gather(2, at.expand(-1, self.draws.shape[1], 1)).flatten())
        logprobs = None
        if self.decoding.logprobs:
            logprobs = (raw.gather(1, tokens[:, None])[:, 0] - raw.logsumexp(-1)).view(-1, columns)
        tokens = tokens.view(-1, columns)
        if self.prefix:  # texts that are still inside the prefix take its tokens
            forced = self.forced[self.ages.clamp(max=len(self.prefix) - 1)]
            tokens = torch.where((self.ages < len(self.prefix))[:, None], forced[:, None], tokens)
        if self.required is not None:
            self.required.append(tokens, None)
        self._pending.append((tokens, logprobs))
        self.ages += 1
        return tokens, None

    def collect(self, already_ended: Collection[int]) -> list[tuple[int, list[Hypothesis]]]:
        """Reads tokens from the device; returns the rows that have ended since, with their texts."""
        for tokens, logprobs in self._pending:
            chosen, chosen_logprobs = tokens.tolist(), None if logprobs is None else logprobs.tolist()
            for place, row in enumerate(self.rows):
                self._read(row, chosen[place], None if chosen_logprobs is None else chosen_logprobs[place])
        self._pending = []
        ended = (place for place, row in enumerate(self.rows) if place not in already_ended and all(row.ended))
        results = []
        for place in ended:
            texts = []
            for text, logs in zip(self.rows[place].tokens, self.rows[place].logprobs, strict=True):
                end = len(text) if text and text[-1] in self.ends else self.limit
                texts.append(Hypothesis(text[:end], logs[:end], sum(logs[:end])))
            results.append((place, texts))
        return results

    def partial_texts(self, row: int) -> list[list[int]]:
        """The tokens of a row's texts that the host has read, end token included."""
        return [tokens[: self.limit] for tokens in self.rows[row].tokens]

    def _create_row(self) -> _Row:
        columns = range(self.decoding.columns)
        return _Row([[] for _ in columns], [[] for _ in columns], ended=[False] * len(columns))

    def _draw_uniforms(self, ids: Sequence[int | str]) -> Tensor:
        seed, columns = self.decoding.seed, range(self.decoding.columns)
        draws = [[numpy_rng(seed, "caption", id, n).random(self.steps) for n in columns] for id in ids]
        return torch.from_numpy(np.array(draws))

    def _read(self, row: _Row, tokens: list[int], logprobs: list[float] | None) -> None:
        row.age += 1
        if row.age <= len(self.prefix):
            return
        for column, token in enumerate(tokens):
            if row.ended[column]:
                continue
            row.tokens[column].append(token)
            if logprobs is not None:
                row.logprobs[column].append(logprobs[column])
            row.ended[column] = token in self.ends or len(row.tokens[column]) == self.steps
