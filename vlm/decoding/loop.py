"""The decoding loop: inputs wait in a queue and take over the rows of finished ones."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlm.decoding.beam import BeamSearch
from vlm.decoding.constraints import in_vocabulary
from vlm.decoding.continuation import right_align
from vlm.decoding.options import Decoding, Hypothesis
from vlm.decoding.sampling import TokenHistory
from vlm.decoding.stepwise import StepwiseSearch
from vlm.models.context import Context, concat_batches
from vlm.models.decoder import TextDecoder
from vlm.nn.step import replay
from vlm.nn.step.replay import StepperPool

TEXTS = 4096  # maximum number of texts decoded in one batch; their keys, values and logits are all in memory

# Ids of inputs, and their encoded states or None. Ids and the seed determine random draws.
Chunk = tuple[Sequence[int | str], Context | None]

# Called with the index of an input and the tokens of its texts so far; returns False to stop decoding it.
Watch = Callable[[int, Sequence[Sequence[int]]], bool]


def decode(
    decoder: TextDecoder,
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
    """Generates texts for a queue of inputs, at most `rows` at a time.

    The texts of an input depend only on the input, its id and the options, not on `rows`, other inputs or their order.

    Args:
        chunks: Encoded inputs, read when rows are free. A chunk without ids means that none is available now: the next
            one is requested when more rows become free. It is the end if nothing is left to decode.
        prompts: Tokens that the text of each input continues, instead of the begin token. They are read at once, so
            every input of the queue must have a row. Constraints on repetition include them; token counts and required
            words do not. The longest prompt determines the maximum length of all texts.
        trees: Filled with the candidates of each step of beam search, by index of the input.
        pool: Recorded steps to reuse across calls; default none.
        watch: Called with each input's texts whenever new tokens are known. If it returns False, decoding of the input
            stops and returns no texts. Prefix and prompt are not included; beam search passes no texts, because beams
            change until the end.
    Yields:
        The index of an input in the queue and its texts, best first, as soon as they are complete.
    Raises:
        UserError: The constraints need more tokens than a text may have.
        ValueError: There are more prompts than rows.
    """
    with torch.inference_mode():
        pool = replay.StepperPool() if pool is None else pool
        loop = _Loop(decoder, chunks, decoding, bos_id, eos_id, rows, torch.device(device), trees, pool, prompts, watch)
    while True:
        with torch.inference_mode():  # must not include the yield, or it would apply to the caller's code
            texts = loop.advance()
        if texts is None:
            return
        yield from texts


@dataclass
class _QueuedInput:
    """An input that waits for a row."""

    place: int
    id: int | str
    context: Context | None


class _Loop:
    def __init__(
        self,
        decoder: TextDecoder,
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
        self.decoder, self.decoding, self.bos_id = decoder, decoding, bos_id
        self.max_rows = max(1, min(rows, TEXTS // decoding.columns))
        self.device, self.trees, self.pool, self.watch = device, trees, pool, watch
        if len(prompts) > self.max_rows:
            raise ValueError(f"there are {len(prompts)} prompts, but only {self.max_rows} rows")
        self.prompts, self.read = prompts, max(map(len, prompts), default=1) - 1  # steps before the first choice
        available = decoder.max_len - self.read
        prefix, limit = len(decoding.rules.prefix), decoding.longest_text(available)
        # The last step is for the end token only, unless it counts.
        self.max_len = min(limit + (not decoding.end_counts), available)
        steps, limit, ends = self.max_len - prefix, limit - prefix, (eos_id, *decoding.ends)
        # Both strategies choose the next tokens of R rows of G texts and report which rows have ended. `begin` takes
        # the inputs of all rows, `replace` assigns others to some, `select` keeps some; each `index` holds rows on the
        # device. `choose` must not wait for the device, `collect` may.
        self.strategy = (
            BeamSearch(decoding, steps=steps, limit=limit, ends=ends, traced=trees is not None)
            if decoding.beam > 1
            else StepwiseSearch(decoding, steps=steps, limit=limit, ends=ends)
        )
        never = in_vocabulary(decoding.never, decoder.token_embed.num_embeddings) if decoding.never else []
        self.never = torch.tensor(never, dtype=torch.long, device=device)
        self.chunks, self.waiting, self.places = iter(chunks), deque[_QueuedInput](), list[int]()
        self.num_inputs = 0  # number of inputs so far
        self.steps: replay.Stepper | None = None
        self.history: TokenHistory | None = None
        self.tokens = torch.empty(0)
        # Reading chosen tokens waits for the device. On a GPU the host runs ahead of it instead.
        self.ahead = replay.uses_cuda_graph(device)
        self.pace = 8 if self.ahead else 1
        self.free: list[int] = []  # rows of finished texts
        self.remaining_steps = 0  # steps until some text must have ended

    def advance(self) -> list[tuple[int, list[Hypothesis]]] | None:
        """Runs steps until texts have ended; returns None when no input is left."""
        if self.steps is None and not self._start():
            return None
        for step in range(1, self.max_len + 1):
            assert self.steps is not None
            logits = self.steps.logits(self.tokens.flatten()[:, None])  # (R * G, V)
            if len(self.never):
                logits.index_fill_(1, self.never, -torch.inf)
            tokens, parents = self.strategy.choose(logits, self.history)
            if parents is not None:
                self.steps.state.reorder_beams(parents)
            if self.history is not None:
                self.history.append(tokens, parents)
            self.tokens = tokens
            self.remaining_steps -= 1
            if step % self.pace == 0 or self.remaining_steps <= 0:
                texts = self._read_ended()
                if texts:
                    return texts
        return []

    def _start(self) -> bool:
        new = self._take_queued(self.max_rows)
        if not new:
            return False
        columns, context = self.decoding.columns, _concat_contexts(new)
        sizes = {"rows": len(new) * columns, "max_len": self.read + self.max_len, "beams": columns}
        self.tokens = torch.empty(len(new), columns, dtype=torch.long, device=self.device)
        self.tokens[:] = self._begin_tokens(context)
        if self.prompts:
            tokens, starts = right_align(self.prompts, self.device)
            self.steps = replay.Stepper(self.decoder, self.decoder.start(context, starts=starts, **sizes))
            if self.read:
                self.steps.logits(tokens[:, :-1].repeat_interleave(columns, 0))
            self.tokens = tokens[:, -1:].repeat(1, columns)
        else:
            self.steps = self.pool.begin(self.decoder, context, device=self.device, **sizes)
        self.strategy.begin([item.id for item in new], self.device)
        self.places, self.free, self.remaining_steps = [item.place for item in new], [], self.max_len
        if self.decoding.rules.needs_history:
            self.history = TokenHistory(
                self.decoding.rules,
                rows=len(new),
                beams=columns,
                max_len=sizes["max_len"],
                bos_id=self.bos_id,
                device=self.device,
            )
            if self.prompts:
                self.history.read(self.prompts)
        return True

    def _read_ended(self) -> list[tuple[int, list[Hypothesis]]]:
        already_ended = {*self.free}
        ended = self.strategy.collect(already_ended)
        done = [(self.places[row], texts) for row, texts in ended]
        if self.trees is not None and isinstance(self.strategy, BeamSearch):
            self.trees |= {self.places[row]: self.strategy.rows[row].tree for row, _ in ended}
        self.free += [row for row, _ in ended]
        if self.watch is not None:
            rows = [row for row in range(len(self.places)) if row not in already_ended]
            stopped = [row for row in rows if not self.watch(self.places[row], self.strategy.partial_texts(row))]
            stopped = [row for row in stopped if row not in self.free]
            done += [(self.places[row], []) for row in stopped]
            self.free += stopped
        # Inputs join a few at a time: each time costs a pass over their keys and values.
        if 8 * len(self.free) >= len(self.places):
            self._refill()
        return done

    def _refill(self) -> None:
        """Assigns the rows of finished texts to waiting inputs; without any, drops rows or ends.

            rows     0   1   2   3   4   5           0   1   2   3   4   5
            inputs   a   -   b   -   c   d    ->     a   e   b   f   c   d       e and f waited
                         free    free                    begin now

        If no input waits, finished rows are dropped once they are half of all. A GPU keeps them: the recorded step has
        a fixed number of rows, and fewer would not be faster.
        """
        new = self._take_queued(len(self.free))
        if new:
            rows, self.free = sorted(self.free)[: len(new)], sorted(self.free)[len(new) :]
            self._replace_rows(rows, new)
        elif len(self.free) == len(self.places):
            self.steps = None
        elif 2 * len(self.free) >= len(self.places) and not self.ahead:
            self._keep_rows([row for row in range(len(self.places)) if row not in self.free])

    def _replace_rows(self, rows: list[int], new: list[_QueuedInput]) -> None:
        """Assigns rows to new inputs, whose texts begin at this step."""
        assert self.steps is not None
        index, context = torch.tensor(rows, device=self.device), _concat_contexts(new)
        self.steps.state.replace(index, self.decoder.read(context))
        if self.history is not None:
            self.history.begin(index)
        self.tokens[index] = self._begin_tokens(context)
        self.strategy.replace(rows, index, [item.id for item in new])
        for row, item in zip(rows, new, strict=True):
            self.places[row] = item.place
        self.remaining_steps = self.max_len

    def _begin_tokens(self, context: Context | None) -> Tensor | int:
        """Returns the first tokens of texts: those of their contexts, (R, 1), or the begin token."""
        begin = None if context is None else context.begin
        return self.bos_id if begin is None else begin[:, None]

    def _keep_rows(self, rows: list[int]) -> None:
        """Keeps only these rows."""
        assert self.steps is not None
        index = torch.tensor(rows, device=self.device)
        self.steps.state.select(index)
        if self.history is not None:
            self.history.select(index)
        self.tokens = self.tokens[index]
        self.strategy.select(rows, index)
        self.places, self.free = [self.places[row] for row in rows], []

    def _take_queued(self, count: int) -> list[_QueuedInput]:
        """Takes up to `count` inputs from the queue."""
        while len(self.waiting) < count:
            chunk = next(self.chunks, None)
            if chunk is None or not chunk[0]:
                break
            ids, context = chunk
            for place, id in enumerate(ids):
                row_context = None if context is None else context.rows(slice(place, place + 1))
                self.waiting.append(_QueuedInput(self.num_inputs, id, row_context))
                self.num_inputs += 1
        return [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]


def _concat_contexts(inputs: Sequence[_QueuedInput]) -> Context | None:
    parts = [item.context for item in inputs if item.context is not None]
    return concat_batches(parts) if parts else None


def decode_batch(
    decoder: TextDecoder,
    context: Context,
    decoding: Decoding,
    *,
    bos_id: int,
    eos_id: int,
    ids: Sequence[int | str] | None = None,
    trees: dict[int, list] | None = None,
    pool: StepperPool | None = None,
) -> list[list[Hypothesis]]:
    """Texts for each input of a batch, best first.

    Args:
        ids: Ids of the inputs, for sampling; default their indices.
        trees, pool: See `decode`.
    """
    count = len(context.states)
    chunks = [(range(count) if ids is None else ids, context)] if count else []
    texts = dict(
        decode(
            decoder,
            chunks,
            decoding,
            bos_id=bos_id,
            eos_id=eos_id,
            rows=max(1, count),
            device=context.states.device,
            trees=trees,
            pool=pool,
        )
    )
    return [texts[place] for place in range(count)]
