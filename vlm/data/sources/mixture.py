"""A weighted mixture of captions, questions, conversations or pairs of answers, with exact shares in every epoch."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

from vlm.data.records import NAMES, Record, Source, Split
from vlm.data.sources.captions import Captions, Coco, Flickr8k
from vlm.data.sources.preferences import PreferenceTable
from vlm.data.sources.questions import Conversations, EasyVQA, QuestionTable
from vlm.errors import Count, Injected, UserError, did_you_mean, find_similar
from vlm.randomness import numpy_rng

WEIGHT, DATA = "weight", "data"
# Sources by the name of their option of data.
SOURCES: dict[str, type[Source]] = {
    "conversations": Conversations,
    "questions": QuestionTable,
    "easy_vqa": EasyVQA,
    "captions": Captions,
    "coco": Coco,
    "flickr8k": Flickr8k,
    "preferences": PreferenceTable,
}


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


class Mixture(Source):
    """A mixture of sources of images with texts. Validation and test splits have all samples of all sources.

    Args:
        mix: One entry per source: ``data``, its name in SOURCES, by default conversations; its options; and
            ``weight``, its share of the samples of an epoch relative to the others, by default 1.
        root: Folder of images, for entries that give none.
        size: Number of samples per epoch; None for the number of training samples of all sources.
        seed: Seed of the order, and of sources that give none.
        needs: The values that the task reads.
    Raises:
        UserError: An entry is invalid, its source lacks a value that the task reads, or its files cannot be read.
    """

    holds = ("image", "captions", "questions", "pairs")
    name = "mixture"

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
        given = {"root": root, "seed": seed, "needs": needs}
        self.sources = [_build_source(entry, number, given) for number, entry in enumerate(mix)]
        self.skipped = [line for source in self.sources for line in source.skipped]
        self.notes = [line for source in self.sources for line in source.notes]
        self.repeated = [line for source in self.sources for line in source.repeated]
        self.rows = sum(source.rows for source in self.sources)
        self.has_turns = any(source.has_turns for source in self.sources)
        for number, source in enumerate(self.sources):
            if "train" not in source.splits:
                named = mix[number].get("path") or mix[number].get("root") or root
                raise UserError(f"data.mix[{number}]: {named} has no training samples; remove it")
        self.splits = tuple(name for name in NAMES if any(name in source.splits for source in self.sources))

    def find_uncaptioned_images(self) -> list[str]:
        return [path for source in self.sources for path in source.find_uncaptioned_images()]

    def open(self, name: str) -> Split:
        splits = {n: source.split(name) for n, source in enumerate(self.sources) if name in source.splits}
        if name != "train":
            return ConcatenatedSplit(splits)
        size = self.size or sum(map(len, splits.values()))
        counts = share_exactly(size, self.weights)
        parts = [MixturePart(number, splits[number], count) for number, count in enumerate(counts) if count]
        return MixtureSplit(parts, self.seed)


def _build_source(entry: Mapping[str, Any], number: int, given: Mapping[str, Any]) -> Source:
    """Builds the source of an entry.

    Args:
        given: Values of options that the entry does not set; None is no value.
    """
    name = entry.get(DATA, "conversations")
    if name not in SOURCES:
        near = did_you_mean(find_similar(str(name), [*SOURCES]))
        raise UserError(f"data.mix[{number}].data: is {name!r:.40}; choose from {', '.join(SOURCES)}{near}")
    kind = SOURCES[name]
    parameters = {name: value for name, value in signature(kind).parameters.items() if name != "needs"}
    options = {name: value for name, value in entry.items() if name not in (WEIGHT, DATA)}
    if unknown := [name for name in options if name not in parameters]:
        known = [DATA, WEIGHT, *parameters]
        near = did_you_mean(find_similar(unknown[0], known))
        raise UserError(f"data.mix[{number}].{unknown[0]}: is not an option; choose from {', '.join(known)}{near}")
    if lacking := sorted({*given["needs"]} - {*kind.holds}):
        raise UserError(
            f"data.mix[{number}]: data={name} holds {' and '.join(kind.holds)}, and the task also reads "
            f"{' and '.join(lacking)}; remove it, or choose another task"
        )
    accepted = signature(kind).parameters
    options = {name: value for name, value in given.items() if name in accepted and value is not None} | options
    if missing := [name for name, value in parameters.items() if value.default is value.empty and name not in options]:
        raise UserError(f"data.mix[{number}].{missing[0]}: missing; give it, as for data={name}")
    return kind(**options)


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
