"""Samples held out of a split by a hash of their names, so that most stay where they are when others are added."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from vlm.data.records import first_fault
from vlm.errors import UserError
from vlm.randomness import key

HELD_OUT = 0.02  # share of train that validates where a data set has no validation split


def check_fractions(val_fraction: float, test_fraction: float) -> None:
    """Refuses fractions that leave nothing to train on.

    Raises:
        UserError: They do.
    """
    if min(val_fraction, test_fraction) < 0 or not val_fraction + test_fraction < 1:
        raise UserError(
            f"data.source.val_fraction={val_fraction} and data.source.test_fraction={test_fraction}: "
            "give numbers from 0 whose sum is below 1"
        )


def draw(names: Sequence[str], fractions: Mapping[str, float], seed: int) -> dict[str, list[int]]:
    """Indices by split: each sample by itself, so that one that is added moves no other.

    Args:
        names: What tells each sample from all others.
        fractions: Share of each split but train, in the order in which they are drawn.
        seed: Seed of which are drawn.
    """
    parts: dict[str, list[int]] = {"train": [], **{split: [] for split in fractions}}
    for index, name in enumerate(names):
        at, bound, chosen = key("split", seed, name) / 2**63, 0.0, "train"
        for split, fraction in fractions.items():
            bound += fraction
            if at < bound:
                chosen = split
                break
        parts[chosen].append(index)
    return parts


def draw_stratified(
    labels: Sequence[Hashable], names: Sequence[str], fractions: Mapping[str, float], seed: int
) -> dict[str, list[int]]:
    """Indices by split, each class keeping its share.

    Args:
        labels: The class of each sample.
        names, fractions, seed: As in `draw`.
    """
    rest = list(range(len(names)))
    parts: dict[str, list[int]] = {}
    counts = {split: round(fraction * len(rest)) for split, fraction in fractions.items()}
    for split, count in counts.items():
        chosen = stratified([labels[index] for index in rest], [names[index] for index in rest], count, seed=seed)
        parts[split] = [rest[at] for at in chosen]
        rest = sorted(set(rest).difference(parts[split]))
    return parts | {"train": rest}


def held_out(file: Path, where: str, split: str) -> str:
    """The fault of a row of the training file that says of itself that it is held out."""
    return (
        f"{file}, {where}: says {split}, in the file of training; leave data.val_path and data.test_path out, or take "
        "such rows away"
    )


def validation(
    names: Sequence[str], labels: Sequence[Hashable] | None, seed: int, *, skipped: Sequence[str] = ()
) -> list[int]:
    """Indices of the training samples that validate where a data set has no validation split.

    Args:
        names: What tells each sample from all others.
        labels: The class of each; None for samples without.
        seed: Seed of which are chosen.
        skipped: Faults of the samples that are not used.
    Raises:
        UserError: There are too few samples; it names the first of the faults.
    """
    if labels is not None:
        held = stratified(labels, names, max(1, round(HELD_OUT * len(names))), seed=seed)
    else:
        places = [key("validation", seed, name) / 2**63 for name in names]  # apart from those by which a test is drawn
        held = [index for index, place in enumerate(places) if place < HELD_OUT]
        held = held or sorted(range(len(names)), key=places.__getitem__)[:1]
    if not held or len(held) == len(names):
        why = first_fault(skipped)
        raise UserError(f"data: too few training samples to hold any out for validation{why}; add some")
    return held


def stratified(labels: Sequence[Hashable], names: Sequence[str], count: int, *, seed: int, leave: int = 1) -> list[int]:
    """Indices of so many samples, each class having its share of them to within one.

    Args:
        labels: The class of each sample.
        names: What tells each sample from all others.
        count: How many to take; fewer are taken where `leave` forbids more.
        seed: Seed of which are taken.
        leave: How many samples of each class are never taken, so that no class goes without.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        members[label].append(index)
    sizes = {label: len(members[label]) for label in sorted(members)}  # type: ignore[type-var]
    taken: list[int] = []
    for label, quota in _quotas(sizes, count, seed=seed, leave=leave).items():
        taken += sorted(members[label], key=lambda index: key("stratified", seed, names[index]))[:quota]
    return sorted(taken)


def _quotas(sizes: Mapping[Hashable, int], count: int, *, seed: int, leave: int) -> dict[Hashable, int]:
    """Number of samples to take of each class, by the largest remainder; the seed decides among equal ones."""
    total = sum(sizes.values())
    count = min(count, total)
    quotas = {label: min(count * size // total, max(0, size - leave)) for label, size in sizes.items()}
    wanting = count - sum(quotas.values())
    remainders = {label: count * size % total for label, size in sizes.items()}
    for label in sorted(sizes, key=lambda label: (-remainders[label], key("quota", seed, label))):  # type: ignore[arg-type]
        if wanting > 0 and remainders[label] and quotas[label] < sizes[label] - leave:
            quotas[label] += 1
            wanting -= 1
    return quotas
