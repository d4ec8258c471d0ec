"""Lists of weights, short enough to be read."""

import re
from collections import Counter
from collections.abc import Iterable


def grouped(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Names by the largest module of which none is among the others, the modules of all layers together."""
    parents = {prefix for name in others for prefix in _prefixes(name)}
    groups = Counter(
        re.sub(r"\.\d+(?=\.|$)", ".*", next(prefix for prefix in _prefixes(name) if prefix not in parents))
        for name in names
    )
    return [f"{group} ({count} {'tensor' if count == 1 else 'tensors'})" for group, count in sorted(groups.items())]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
