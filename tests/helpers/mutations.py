"""Random changes of nested values."""

import json
import re
from random import Random
from typing import Any

VALUES = [None, True, "", "many", "1e9", [], [1, 2], {}, {"a": 1}, -1, 0, 3, 7, 0.5, 1e9, 10**9, 10**30, float("nan")]


def places(value: Any, path: tuple = ()) -> Any:
    """Yields the path of every value in nested dicts and lists."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def change(content: Any, dice: Random, *, mostly: re.Pattern[str] | None = None) -> str:
    """Replaces or removes one value in place; returns what was changed.

    Args:
        mostly: Pattern of keys that are chosen more often.
    """
    found = [*places(content)]
    wanted = [one for one in found if mostly and mostly.search(str(one[-1]))]
    *path, last = dice.choice(wanted if wanted and dice.random() < 0.6 else found)
    part = content
    for key in path:
        part = part[key]
    if isinstance(part, dict) and dice.random() < 0.2:
        part.pop(last)
    else:
        part[last] = dice.choice(VALUES)
    left = part.get(last) if isinstance(part, dict) else part[last]
    return f"{'.'.join(map(str, [*path, last]))}={json.dumps(left, default=repr)}"
