"""Random changes of nested values, and whether a changed model is read or refused."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

from vlm.checkpoint.load import load_model, read
from vlm.errors import UserError

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


def is_read(place: Path, inputs: Sequence[Tensor], what: object) -> bool:
    """True if a changed model is read and computes, False if it is refused in a line; anything else fails the test."""
    try:
        load_model(read(place))(*inputs)
    except UserError as fault:
        assert "\n" not in str(fault) and str(place) in str(fault), what
        assert "does not describe a supported model" not in str(fault), (what, str(fault))
        return False
    except BaseException as fault:
        pytest.fail(f"{what}: {fault!r}")
    return True
