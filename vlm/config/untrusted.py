"""Limits for untrusted config files: they must not change how Hydra runs or read environment variables.

Hydra instantiates classes that its own part of a config names before any code of vlm runs. The command line is trusted.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from vlm.config.tree import Value
from vlm.errors import UserError

# Keys that change with every composition or are harmless, such as the values of a sweep.
_CHANGEABLE_KEYS = (
    "hydra.runtime",
    "hydra.overrides",
    "hydra.job",
    "hydra.searchpath",
    "hydra.mode",
    "hydra.sweeper.params",
)
_FIXED_KEYS = ("hydra.job.env_set", "hydra.job.env_copy", "hydra.job.chdir")

_allowed_variables: set[str] = set()


def find_differences(actual: Value, expected: Value, key: str) -> Iterator[str]:
    """Yields the keys under `hydra` in which a composed config differs from the shipped one and must not."""
    fixed = any(name.startswith(key) or key.startswith(name) for name in _FIXED_KEYS)
    changeable = not fixed and any(key == name or key.startswith(f"{name}.") for name in _CHANGEABLE_KEYS)
    if actual == expected or changeable:
        return
    if not isinstance(actual, dict) or not isinstance(expected, dict):
        yield key
        return
    for name in sorted({*actual, *expected}, key=str):
        yield from find_differences(actual.get(name), expected.get(name), f"{key}.{name}")


@contextmanager
def allow_environment(overrides: list[str]) -> Iterator[None]:
    """Context in which ``${oc.env:NAME}`` can read only the environment variables that these overrides name."""
    names = set(re.findall(r"oc\.env:\s*['\"]?(\w+)", " ".join(overrides))) - _allowed_variables
    _allowed_variables.update(names)
    try:
        yield
    finally:
        _allowed_variables.difference_update(names)


def _read_variable(name: str, *default: str | None) -> str | None:
    if name not in _allowed_variables:
        raise UserError(f"config files must not read environment variables ({name}); set the value on the command line")
    return oc.env(name, *default)


OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)
