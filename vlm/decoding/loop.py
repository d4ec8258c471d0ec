"""The loop over decode steps: images wait in a queue, and take the places of those whose texts have ended."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vlm.decoding.beam import Beam
from vlm.decoding.continuation import aligned
from vlm.decoding.options import Decoding, Hypothesis
from vlm.decoding.stepwise import Stepwise
from vlm.decoding.token_history import TokenHistory
from vlm.models.context import Context, joined
from vlm.nn.step import replay

TEXTS = 4096  # that are decoded side by side, at most; their keys, values and logits are held at once

# Ids of images, which with the seed decide what is drawn for them, and their encoded states, or None without any.
Chunk = tuple[Sequence[int | str], Context | None]

# Is shown the place of an image and the tokens of its texts so far; false where nobody wants them any more.
Watch = Callable[[int, Sequence[Sequence[int]]], bool]


class StepDecoder(Protocol):
    """A decoder, as decoding uses it."""

    max_len: int

    def start(
        self,
        context: Context | None,
        *,
        rows: int,
        max_len: int,
        starts: Tensor | None = None,
        beams: int | None = None,
    ) -> Any: ...
    def keys_values(self, context: Context | None) -> Any: ...
    def step(self, tokens: Tensor, state: Any) -> Tensor: ...
    def head(self, hidden: Tensor) -> Tensor: ...


class Chooser(Protocol):
    """A search: chooses the next tokens of R rows of G texts, and tells which rows have ended.

    `begin` takes the images of all rows, `replace` others for some rows, `select` keeps some; each index holds rows on
    the device. `choose` must not wait for the device, `collect` may.
    """

    def begin(self, ids: Sequence[int | str], device: torch.device) -> None: ...
    def replace(self, rows: Sequence[int], index: Tensor, ids: Sequence[int | str]) -> None: ...
    def select(self, rows: Sequence[int], index: Tensor) -> None: ...
    def choose(self, logits: Tensor, history: TokenHistory | None) -> tuple[Tensor, Tensor | None]: ...
    def collect(self, known: Collection[int]) -> list[tuple[int, list[Hypothesis]]]: ...
    def written(self, row: int) -> Sequence[Sequence[int]]: ...


def decode(
    decoder: StepDecoder,
    chunks: Iterable[Chunk],
    decoding: Decoding,
    *,
    bos_id: int,
    eos_id: int,
    rows: int,
    device: torch.device | str = "cpu",
    trees: dict[int, list] | None = None,
    pool: replay.StepperPool | None = None,
    prompts: Sequence[Sequence[int]] = (),
    watch: Watch | None = None,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Finds texts for a queue of images, at most `rows` at a time.

    The texts of an image depend on it, its id and the options alone: not on rows, its neighbours or the order.

    Args:
        chunks: Encoded images, taken as there is room for them. One without ids says that none waits now: it is asked
            for the next one as further rows fall free, and is the end where nothing is left to decode.
        prompts: Tokens that the text of each place goes on from, in place of the begin token. They are read at once,
            so that all places of the queue must have a row. Rules on what a text repeats look at them too; counts of
            tokens and required words are of what follows. All have as much room as the longest leaves.
        trees: Takes the candidates of each step of each image's beam search, by its place.
        pool: Recorded steps of calls before, and for calls to come; by default none.
        watch: Is shown each image's texts whenever tokens of them become known. An image whose texts nobody wants ends
            there, without any. They have neither prefix nor prompt; beams change until their end, and show none.
    Yields:
        The place of an image in the queue and its texts, best first, as soon as they are found.
    Raises:
        UserError: The rules ask for more than a text has room for.
        ValueError: There are more prompts than rows.
    """
    with torch.inference_mode():
        pool = replay.StepperPool() if pool is None else pool
        loop = _Loop(decoder, chunks, decoding, bos_id, eos_id, rows, torch.device(device), trees, pool, prompts, watch)
    while True:
        with torch.inference_mode():  # not around the yield, or it would be on in the caller's code too
            texts = loop.advance()
        if texts is None:
            return
        yield from texts


@dataclass
class _Waiting:
    place: int
    id: int | str
    context: Context | None


class _Loop:
    def __init__(
        self,
        decoder: StepDecoder,
        chunks: Iterable[Chunk],
        decoding: Decoding,
        bos_id: int,
        eos_id: int,
        rows: int,
        device: torch.device,
        trees: dict[int, list] | None,
        pool: replay.StepperPool,
        prompts: Sequence[Sequence[int]],
        watch: Watch | None,
    ) -> None:
        self.decoder, self.decoding, self.bos_id, self.eos_id = decoder, decoding, bos_id, eos_id
        self.room = max(1, min(rows, TEXTS // decoding.columns))
        self.device, self.trees, self.pool, self.watch = device, trees, pool, watch
        if len(prompts) > self.room:
            raise ValueError(f"{len(prompts)} prompts are more than {self.room} rows")
        self.prompts, self.read = prompts, max(map(len, prompts), default=1) - 1  # steps before the first choice
        room = decoder.max_len - self.read
        prefix, limit = len(decoding.rules.prefix), decoding.longest_text(room)
        # The last step is there for an end token only, unless that counts.
        self.max_len = min(limit + (not decoding.end_counts), room)
        options: dict[str, Any] = {"steps": self.max_len - prefix, "limit": limit - prefix, "eos_id": eos_id}
        self.chooser: Chooser = (
            Beam(decoding, **options, traced=trees is not None) if decoding.beam > 1 else Stepwise(decoding, **options)
        )
        self.chunks, self.waiting, self.places = iter(chunks), deque[_Waiting](), list[int]()
        self.came = 0  # images so far
        self.steps: replay.Stepper | None = None
        self.history: TokenHistory | None = None
        self.tokens = torch.empty(0)
        # Reading chosen tokens waits for the device. On a GPU the host runs ahead of it instead.
        self.ahead = replay.replayed(device)
        self.pace = 8 if self.ahead else 1
        self.free: list[int] = []  # rows whose texts have ended
        self.left = 0  # steps until a text must have ended

    def advance(self) -> list[tuple[int, list[Hypothesis]]] | None:
        """Takes steps until texts have ended; None once no image is left."""
        if self.steps is None and not self._start():
            return None
        for step in range(1, self.max_len + 1):
            assert self.steps is not None
            logits = self.steps.logits(self.tokens.flatten()[:, None])  # (R * G, V)
            tokens, parents = self.chooser.choose(logits, self.history)
            if parents is not None:
                self.steps.state.reorder_beams(parents)
            if self.history is not None:
                self.history.append(tokens, parents)
            self.tokens = tokens
            self.left -= 1
            if step % self.pace == 0 or self.left <= 0:
                texts = self._settle()
                if texts:
                    return texts
        return []

    def _start(self) -> bool:
        new = self._take(self.room)
        if not new:
            return False
        columns, context = self.decoding.columns, _joined(new)
        sizes = {"rows": len(new) * columns, "max_len": self.read + self.max_len, "beams": columns}
        self.tokens = torch.full((len(new), columns), self.bos_id, device=self.device)
        if self.prompts:
            tokens, starts = aligned(self.prompts, self.device)
            self.steps = replay.Stepper(self.decoder, self.decoder.start(context, starts=starts, **sizes))
            if self.read:
                self.steps.logits(tokens[:, :-1].repeat_interleave(columns, 0))
            self.tokens = tokens[:, -1:].repeat(1, columns)
        else:
            self.steps = self.pool.begin(self.decoder, context, device=self.device, **sizes)
        self.chooser.begin([item.id for item in new], self.device)
        self.places, self.free, self.left = [item.place for item in new], [], self.max_len
        if self.decoding.rules.read_texts:
            sizes["rows"] = len(new)
            self.history = TokenHistory(self.decoding.rules, **sizes, bos_id=self.bos_id, device=self.device)
            if self.prompts:
                self.history.read(self.prompts)
        return True

    def _settle(self) -> list[tuple[int, list[Hypothesis]]]:
        known = {*self.free}
        ended = self.chooser.collect(known)
        done = [(self.places[row], texts) for row, texts in ended]
        if self.trees is not None and isinstance(self.chooser, Beam):
            self.trees |= {self.places[row]: self.chooser.rows[row].tree for row, _ in ended}
        self.free += [row for row, _ in ended]
        if self.watch is not None:
            unwanted = self._unwanted(self.watch, {*self.free}, known)
            done += [(self.places[row], []) for row in unwanted]
            self.free += unwanted
        # Images join a few at a time: each time costs a pass over their keys and values.
        if 8 * len(self.free) >= len(self.places):
            self._refill()
        return done

    def _unwanted(self, watch: Watch, ended: Collection[int], known: Collection[int]) -> list[int]:
        """Shows the texts of all rows but those known of; returns the rows whose texts nobody wants to be ended."""
        rows = [row for row in range(len(self.places)) if row not in known]
        wanted = [watch(self.places[row], self.chooser.written(row)) for row in rows]
        return [row for row, wants in zip(rows, wanted, strict=True) if not wants and row not in ended]

    def _refill(self) -> None:
        """Gives the rows of ended texts to waiting images; without any, goes on with fewer rows, or ends.

            rows     0   1   2   3   4   5           0   1   2   3   4   5
            images   a   -   b   -   c   d    ->     a   e   b   f   c   d       e and f waited
                         free    free                    begin now

        With none waiting, rows of ended texts are dropped once they are half of all. A GPU keeps them: a step was
        recorded for so many rows, and takes as long with fewer.
        """
        new = self._take(len(self.free))
        if new:
            rows, self.free = sorted(self.free)[: len(new)], sorted(self.free)[len(new) :]
            self._replace(rows, new)
        elif len(self.free) == len(self.places):
            self.steps = None
        elif 2 * len(self.free) >= len(self.places) and not self.ahead:
            self._keep([row for row in range(len(self.places)) if row not in self.free])

    def _replace(self, rows: list[int], new: list["_Waiting"]) -> None:
        """Gives rows to new images, whose texts begin at this step."""
        assert self.steps is not None
        index, context = torch.tensor(rows, device=self.device), _joined(new)
        mask = None if context is None else context.mask
        self.steps.state.replace(index, self.decoder.keys_values(context), mask)
        if self.history is not None:
            self.history.begin(index)
        self.tokens[index] = self.bos_id
        self.chooser.replace(rows, index, [item.id for item in new])
        for row, item in zip(rows, new, strict=True):
            self.places[row] = item.place
        self.left = self.max_len

    def _keep(self, rows: list[int]) -> None:
        """Goes on with these rows alone."""
        assert self.steps is not None
        index = torch.tensor(rows, device=self.device)
        self.steps.state.select(index)
        if self.history is not None:
            self.history.select(index)
        self.tokens = self.tokens[index]
        self.chooser.select(rows, index)
        self.places, self.free = [self.places[row] for row in rows], []

    def _take(self, count: int) -> list[_Waiting]:
        """Up to `count` images from the queue."""
        while len(self.waiting) < count:
            chunk = next(self.chunks, None)
            if chunk is None or not chunk[0]:
                break
            ids, context = chunk
            for place, id in enumerate(ids):
                one = None if context is None else context.rows(slice(place, place + 1))
                self.waiting.append(_Waiting(self.came, id, one))
                self.came += 1
        return [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]


def _joined(waiting: Sequence[_Waiting]) -> Context | None:
    parts = [item.context for item in waiting if item.context is not None]
    return joined(parts) if parts else None
