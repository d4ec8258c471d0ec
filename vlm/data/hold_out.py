"""Held-out samples, chosen by a hash of their ids, so that adding samples moves few others."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from vlm.data.records import error_summary
from vlm.errors import UserError
from vlm.randomness import key

HELD_OUT = 0.02  # share of train used for validation if a data set has no validation split


def check_fractions(val_fraction: float, test_fraction: float) -> None:
    """Checks that the fractions leave samples to train on.

    Raises:
        UserError: They do not.
    """
    if min(val_fraction, test_fraction) < 0 or not val_fraction + test_fraction < 1:
        raise UserError(
            f"data.source.val_fraction={val_fraction} and data.source.test_fraction={test_fraction}: "
            "give numbers from 0 with a sum below 1"
        )


def draw_splits(names: Sequence[str], fractions: Mapping[str, float], seed: int) -> dict[str, list[int]]:
    """Draws each sample's split independently; returns indices by split.

    Args:
        names: Unique id of each sample.
        fractions: Share of each split except train, in the order in which they are drawn.
        seed: Random seed.
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


def draw_stratified_splits(
    labels: Sequence[Hashable], names: Sequence[str], fractions: Mapping[str, float], seed: int
) -> dict[str, list[int]]:
    """Draws splits that keep the share of each class; returns indices by split.

    Args:
        labels: Class of each sample.
        names, fractions, seed: See `draw_splits`.
    """
    remaining = list(range(len(names)))
    parts: dict[str, list[int]] = {}
    counts = {split: round(fraction * len(remaining)) for split, fraction in fractions.items()}
    for split, count in counts.items():
        chosen = sample_stratified(
            [labels[index] for index in remaining], [names[index] for index in remaining], count, seed=seed
        )
        parts[split] = [remaining[at] for at in chosen]
        remaining = sorted(set(remaining).difference(parts[split]))
    return parts | {"train": remaining}


def wrong_split_message(file: Path, where: str, split: str) -> str:
    """Error message for a row of the training file that is marked as another split."""
    return (
        f"{file}, {where}: a row of split {split} in the training file; unset data.val_path and data.test_path, or "
        "remove such rows"
    )


def draw_validation_indices(
    names: Sequence[str], labels: Sequence[Hashable] | None, seed: int, *, skipped: Sequence[str] = ()
) -> list[int]:
    """Indices of the training samples that are used for validation if a data set has no validation split.

    Args:
        names: Unique id of each sample.
        labels: Class of each sample; None for samples without labels.
        seed: Random seed.
        skipped: Messages about samples that are not used.
    Raises:
        UserError: There are too few samples; it shows the first message.
    """
    if labels is not None:
        validation = sample_stratified(labels, names, max(1, round(HELD_OUT * len(names))), seed=seed)
    else:
        places = [key("validation", seed, name) / 2**63 for name in names]  # independent of the draw of a test split
        validation = [index for index, place in enumerate(places) if place < HELD_OUT]
        validation = validation or sorted(range(len(names)), key=places.__getitem__)[:1]
    if not validation or len(validation) == len(names):
        why = error_summary(skipped)
        raise UserError(f"data: too few training samples to hold some out for validation{why}; add samples")
    return validation


def sample_stratified(
    labels: Sequence[Hashable], names: Sequence[str], count: int, *, seed: int, keep_per_class: int = 1
) -> list[int]:
    """Indices of `count` samples, with each class represented proportionally to within one sample.

    Args:
        labels: Class of each sample.
        names: Unique id of each sample.
        count: Number of samples; fewer if `keep_per_class` requires it.
        seed: Random seed.
        keep_per_class: Number of samples of each class that are never chosen.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        members[label].append(index)
    sizes = {label: len(members[label]) for label in sorted(members)}  # type: ignore[type-var]
    chosen: list[int] = []
    for label, quota in _compute_quotas(sizes, count, seed=seed, keep_per_class=keep_per_class).items():
        chosen += sorted(members[label], key=lambda index: key("stratified", seed, names[index]))[:quota]
    return sorted(chosen)


def _compute_quotas(
    sizes: Mapping[Hashable, int], count: int, *, seed: int, keep_per_class: int
) -> dict[Hashable, int]:
    """Number of samples to take of each class, by largest remainder; the seed breaks ties."""
    total = sum(sizes.values())
    count = min(count, total)
    quotas = {label: min(count * size // total, max(0, size - keep_per_class)) for label, size in sizes.items()}
    missing = count - sum(quotas.values())
    remainders = {label: count * size % total for label, size in sizes.items()}
    for label in sorted(sizes, key=lambda label: (-remainders[label], key("quota", seed, label))):  # type: ignore[arg-type]
        if missing > 0 and remainders[label] and quotas[label] < sizes[label] - keep_per_class:
            quotas[label] += 1
            missing -= 1
    return quotas
