"""Limits of config files, which people share: they may not change how Hydra runs, nor read the environment.

Hydra builds whatever its own part of a config names before any code of vlm runs. The command line is not limited,
because the user types it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from vlm.errors import UserError

# Keys that may differ: they change with every composition, or are harmless, such as a sweep's values.
_FREE = ("hydra.runtime", "hydra.overrides", "hydra.job", "hydra.searchpath", "hydra.mode", "hydra.sweeper.params")
_FIXED = ("hydra.job.env_set", "hydra.job.env_copy", "hydra.job.chdir")

_readable: set[str] = set()


def check_hydra(own: Any, shipped: Any) -> None:
    """Compares Hydra's part of a composed config with that of the shipped config.

    Raises:
        UserError: A config file changes how Hydra runs.
    """
    ours, theirs = (OmegaConf.to_container(node, resolve=False) for node in (shipped, own))
    if differing := list(_differences(theirs, ours, "hydra")):
        fault = "decides how Hydra runs, and no config file may set it; give it on the command line"
        raise UserError("\n".join(f"{key}: {fault}" for key in differing[:5]))


def _differences(one: Any, other: Any, key: str) -> Iterator[str]:
    fixed = any(name.startswith(key) or key.startswith(name) for name in _FIXED)
    if one == other or (not fixed and any(key == name or key.startswith(f"{name}.") for name in _FREE)):
        return
    if not isinstance(one, dict) or not isinstance(other, dict):
        yield key
        return
    for name in sorted({*one, *other}, key=str):
        yield from _differences(one.get(name), other.get(name), f"{key}.{name}")


@contextmanager
def readable(overrides: list[str]) -> Iterator[None]:
    """Context in which ``${oc.env:NAME}`` may read only the variables that these overrides name."""
    names = set(re.findall(r"oc\.env:\s*['\"]?(\w+)", " ".join(overrides))) - _readable
    _readable.update(names)
    try:
        yield
    finally:
        _readable.difference_update(names)


def _environment(name: str, *default: str | None) -> str | None:
    if name not in _readable:
        raise UserError(f"reads the environment variable {name}; give the value itself on the command line")
    return oc.env(name, *default)


OmegaConf.register_new_resolver("oc.env", _environment, replace=True)
