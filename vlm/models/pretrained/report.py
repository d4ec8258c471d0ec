"""Short lists of weights for messages."""

import re
from collections import Counter
from collections.abc import Iterable


def grouped(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Groups names by the largest module that contains none of the other names; layer numbers become *."""
    parents = {prefix for name in others for prefix in _prefixes(name)}
    groups = Counter(
        re.sub(r"\.\d+(?=\.|$)", ".*", next(prefix for prefix in _prefixes(name) if prefix not in parents))
        for name in names
    )
    return [f"{group} ({count} {'tensor' if count == 1 else 'tensors'})" for group, count in sorted(groups.items())]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
