"""A weighted mixture of conversations from several tables, with exact shares in every epoch."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

from vlm.data.records import NAMES, Record, Source, Split
from vlm.data.sources.questions import Conversations
from vlm.errors import Count, Injected, UserError, did_you_mean, find_similar
from vlm.randomness import numpy_rng

WEIGHT = "weight"


class MixturePart(NamedTuple):
    """A source of a mixture.

    Args:
        number: Its number, from 0, which begins the ids of its records.
        split: Its training split.
        samples: Number of samples that it contributes to an epoch.
    """

    number: int
    split: Split
    samples: int


class MixtureSplit(Split):
    """Training samples of several sources, each with an exact number of samples per epoch.

    A source is read in random order, and entirely before any of its samples is repeated, over as many epochs as that
    takes. A sample is a function of (seed, epoch, index), so that a resumed run reads the same ones.
    """

    fresh = True

    def __init__(self, parts: Sequence[MixturePart], seed: int) -> None:
        self.parts, self.seed = parts, seed
        self._orders: dict[tuple[int, int], Sequence[int]] = {}

    def __len__(self) -> int:
        return sum(part.samples for part in self.parts)

    def record(self, index: int, epoch: int = 0) -> Record:
        part, place = self.parts[0], index
        for part in self.parts:
            if place < part.samples:
                break
            place -= part.samples
        passes, at = divmod(epoch * part.samples + place, len(part.split))
        key = part.number, passes
        if key not in self._orders:
            # An epoch reads parts of at most a few passes; the orders of earlier ones are dropped.
            self._orders = {kept: order for kept, order in self._orders.items() if kept != (part.number, passes - 2)}
            order = numpy_rng("mixture", self.seed, *key).permutation(len(part.split))
            self._orders[key] = order.tolist()
        return _with_number(part.split.record(self._orders[key][at], passes), part.number)


class ConcatenatedSplit(Split):
    """The samples of several splits, one after the other."""

    def __init__(self, splits: Mapping[int, Split]) -> None:
        self.splits = splits

    def __len__(self) -> int:
        return sum(map(len, self.splits.values()))

    def record(self, index: int, epoch: int = 0) -> Record:
        for number, split in self.splits.items():
            if index < len(split):
                return _with_number(split.record(index, epoch), number)
            index -= len(split)
        raise IndexError(index)


def _with_number(record: Record, number: int) -> Record:
    record.id = f"{number}/{record.id}"
    return record


class ConversationMixture(Source):
    """A mixture of tables of conversations. Validation and test splits have all samples of all tables.

    Args:
        mix: One entry per table: its options as in Conversations, and ``weight``, its share of the samples of an epoch
            relative to the others; default 1.
        root: Folder of images, for entries that give none.
        size: Number of samples per epoch; None for the number of training samples of all tables.
        seed: Seed of the order.
        needs: As in Conversations.
    Raises:
        UserError: An entry is invalid, or a table cannot be read.
    """

    holds = ("image", "questions")
    has_turns = True
    name = "conversation mixture"

    def __init__(
        self,
        *,
        mix: Sequence[Mapping[str, Any]],
        root: str | None = None,
        size: Count | None = None,
        seed: int = 0,
        needs: Injected[Sequence[str]] = ("image", "questions"),
    ) -> None:
        if not mix:
            raise UserError("data.mix: is empty; give at least one table, such as data.mix=[{path: chats.jsonl}]")
        self.seed, self.size = seed, size
        self.weights = [_read_weight(entry, number) for number, entry in enumerate(mix)]
        self.sources: list[Conversations] = []
        for number, entry in enumerate(mix):
            options = {name: value for name, value in entry.items() if name != WEIGHT}
            known = [name for name in signature(Conversations.__init__).parameters if name not in ("self", "needs")]
            if unknown := [name for name in options if name not in known]:
                near = did_you_mean(find_similar(unknown[0], [*known, WEIGHT]))
                raise UserError(
                    f"data.mix[{number}].{unknown[0]}: is not an option; choose from weight, {', '.join(known)}{near}"
                )
            if "path" not in options:
                raise UserError(f"data.mix[{number}].path: missing; give the table of conversations")
            self.sources.append(Conversations(**{"root": root, "seed": seed, **options}, needs=needs))
        self.skipped = [line for source in self.sources for line in source.skipped]
        self.notes = [line for source in self.sources for line in source.notes]
        self.repeated = [line for source in self.sources for line in source.repeated]
        self.rows = sum(source.rows for source in self.sources)
        without_train = [
            entry["path"] for entry, source in zip(mix, self.sources, strict=True) if "train" not in source.splits
        ]
        if without_train:
            raise UserError(f"data.mix: {without_train[0]} has no training samples; remove it")
        self.splits = tuple(name for name in NAMES if any(name in source.splits for source in self.sources))

    def open(self, name: str) -> Split:
        splits = {n: source.split(name) for n, source in enumerate(self.sources) if name in source.splits}
        if name != "train":
            return ConcatenatedSplit(splits)
        size = self.size or sum(map(len, splits.values()))
        counts = share_exactly(size, self.weights)
        parts = [MixturePart(number, splits[number], count) for number, count in enumerate(counts) if count]
        return MixtureSplit(parts, self.seed)


def _read_weight(entry: Mapping[str, Any], number: int) -> float:
    weight = entry.get(WEIGHT, 1) if isinstance(entry, Mapping) else None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise UserError(f"data.mix[{number}]: is {entry!r:.60}; give a path and a weight above 0")
    return float(weight)


def share_exactly(total: int, weights: Sequence[float]) -> list[int]:
    """Divides a total in proportion to weights, by the method of largest remainders; the shares sum to the total."""
    quotas = [total * weight / sum(weights) for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda at: (counts[at] - quotas[at], at))
    for at in by_remainder[: total - sum(counts)]:
        counts[at] += 1
    return counts
