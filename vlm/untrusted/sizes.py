"""Ranges of the sizes that checkpoints and configs state; imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

# A value of a JSON file, which may have any type until it is checked.
JsonValue: TypeAlias = str | int | float | Sequence["JsonValue"] | Mapping[str, "JsonValue"] | None

# Ranges of sizes that are not bounded by stored tensors; far larger than in any model or data set of vlm.
BOUNDS = {
    **dict.fromkeys(("image_size", "patch_size"), (1, 4096)),
    **dict.fromkeys(("depth", "encoder_depth", "decoder_depth"), (1, 1000)),
    "order": (2, 2**20),
    **dict.fromkeys(("max_len", "max_tokens", "prompt_tokens", "batch_size", "eval_batch_size"), (1, 2**20)),
    **dict.fromkeys(("num_workers", "repeats", "num_nodes"), (0, 1024)),
    **{
        f"{split}_{what}": (0, 10**7)  # their order is held in memory
        for split in ("train", "val", "test")
        for what in ("scenes", "documents", "pairs", "captions", "stories", "lines")
    },
    **dict.fromkeys(("scenes", "max_objects", "captions_per_image"), (1, 1000)),
    **dict.fromkeys(("beam", "results"), (1, 1024)),
    "devices": (-1, 128),  # -1: all devices
}


def check_sizes(value: Any) -> None:
    """Checks all sizes in a specification before anything is built.

    Raises:
        ValueError: A size is out of range.
    """
    for fault in out_of_bounds(value):
        raise ValueError(fault)


def out_of_bounds(value: JsonValue, path: str = "") -> Iterator[str]:
    """Yields a message for each size in a specification or config that is out of range, and for each huge integer."""
    children = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    )
    for key, child in children:
        where = f"{path}.{key}" if path else str(key)
        bounds = BOUNDS.get(key) if isinstance(key, str) else None
        if isinstance(child, int) and child.bit_length() > 63:
            yield f"{where}: the number is too large"
        elif bounds and not _is_within(child, bounds):
            yield f"{where}: {child} is out of bounds, {bounds[0]} to {bounds[1]}"
        yield from out_of_bounds(child, where)


def _is_within(size: JsonValue, bounds: tuple[int, int]) -> bool:
    """Returns True if a number, or each number of a list such as height and width, is within bounds."""
    if isinstance(size, list | tuple):
        return all(_is_within(side, bounds) for side in size if isinstance(side, int | float))
    return not isinstance(size, int | float) or bounds[0] <= size <= bounds[1]
