"""Configs as trees of plain containers: keys, interpolations and their resolution.

A stored config keeps its interpolations, so that an override of a key also changes the keys that refer to it. It may
interpolate only keys of the config and two formulas, no environment variables and no other resolvers. The syntax is
OmegaConf's.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

from vlm.errors import UserError

# Values that depend on sizes are computed from them: ${sum:${data.max_len},-2}.
FORMULAS: dict[str, Callable[..., int | float]] = {
    "sum": lambda *terms: sum(terms),
    "div": lambda dividend, divisor: dividend // divisor if divisor else dividend,
}
# A value of a config, in plain containers, and a config or a group of it, with or without interpolations.
Value: TypeAlias = "bool | int | float | str | list[Value] | tuple[Value, ...] | dict[str, Value] | None"
Tree: TypeAlias = dict[str, Value]
MISSING = "???"
MAX_VALUES = 100_000  # of a resolved config, including the characters of interpolated strings
MAX_DEPTH = 50  # of nested interpolations

_KEY = r"[A-Za-z_]\w*(?:\.\w+)*"
_TERM = rf"(?:\$\{{{_KEY}\}}|-?\d+)"
# Before "${", pairs of backslashes stand for single ones; a further backslash makes "${" literal.
_PART = re.compile(
    rf"(?<!\\)(?P<pairs>(?:\\\\)*)(?:(?P<literal>\\\$\{{)|\$\{{(?P<key>{_KEY})\}}"
    rf"|\$\{{(?P<formula>{'|'.join(FORMULAS)}):(?P<terms>{_TERM}(?:,{_TERM})*)\}})"
)


class Config(dict[str, Any]):
    """A resolved config in plain containers. Its values are checked once, by `vlm.training.config.check`.

    Attributes:
        tree: The config with its interpolations.
        typed: The command-line arguments that it was composed from.
    """

    tree: Tree
    typed: Sequence[str] = ()


class MissingKey(UserError):
    """An interpolation refers to a missing key."""


def resolve(tree: Tree) -> Config:
    """Resolves the interpolations of a tree.

    Raises:
        UserError: A value is missing (``???``), or an interpolation refers to a missing key, is circular, is neither a
            key nor one of FORMULAS, or expands to too many values.
    """
    resolution = _Resolution(tree)
    try:
        config = Config(cast(Tree, resolution.value(tree, "")))
    except RecursionError as fault:
        raise UserError("the config's interpolations are nested too deeply; use another config") from fault
    if resolution.missing:
        raise UserError("\n".join(f"{key}: has no value; give {key}=VALUE" for key in sorted(resolution.missing)))
    config.tree = tree
    return config


def replace(config: Config, /, **groups: Value) -> Config:
    """Returns a copy of a config with other values of some keys, without interpolations."""
    return resolve(escape({**config, **groups}))


def is_plain(text: str) -> bool:
    """Returns True for a string that interpolates only keys and FORMULAS."""
    return "${" not in _PART.sub(lambda part: " " if part["literal"] else "", text)


def escape(value: Any) -> Any:
    """Escapes every ``${`` in the strings of plain containers."""
    if isinstance(value, dict):
        return {key: escape(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [escape(child) for child in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


class _Resolution:
    """Resolves the values of a tree, with limits on their number and nesting.

    Attributes:
        budget: Number of values that may still be expanded.
        open: Keys that are being interpolated, outermost first.
        missing: Keys without a value.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree, self.budget = tree, MAX_VALUES
        self.open: list[str] = []
        self.missing: set[str] = set()

    def value(self, value: Value, key: str) -> Value:
        self._spend(1)
        if isinstance(value, dict):
            return {name: self.value(child, f"{key}.{name}" if key else str(name)) for name, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(child, f"{key}.{index}") for index, child in enumerate(value)]
        if value == MISSING:
            self.missing.add(key)
        return self._text(value, key) if isinstance(value, str) and "${" in value else value

    def _text(self, text: str, key: str) -> Value:
        if not is_plain(text):
            raise UserError(f"{key}: {text!r:.80} interpolates more than keys, sum and div; give the value itself")
        if interpolation := _match_single(text):
            return self._interpolation(interpolation, key)

        def replace(match: re.Match[str]) -> str:
            return match["pairs"][::2] + ("${" if match["literal"] else str(self._interpolation(match, key)))

        text = _PART.sub(replace, text)
        self._spend(len(text))
        return text

    def _interpolation(self, match: re.Match[str], key: str) -> Value:
        if match["key"]:
            return self._at(match["key"], key)
        terms = match["terms"].split(",")
        values = [self._at(term[2:-1], key) if term.startswith("$") else int(term) for term in terms]
        if MISSING in values:
            return MISSING
        for term, value in zip(terms, values, strict=True):
            if not isinstance(value, int | float):
                raise UserError(f"{term.strip('${}')}: {value!r:.80} is not a number, but {key} is computed from it")
        try:
            return FORMULAS[match["formula"]](*values)
        except TypeError as fault:
            raise UserError(f"{key}: {match[0]!r:.80}: {match['formula']} does not take so many terms") from fault

    def _at(self, source: str, key: str) -> Value:
        if source in self.open or len(self.open) > MAX_DEPTH:
            raise UserError(f"{key}: the interpolation of {source:.80} is circular")
        try:
            node, remaining = reach(self.tree, source)
        except KeyError as fault:
            raise MissingKey(f"{key}: Interpolation key '{source}' not found") from fault
        self.open.append(source)
        if not remaining:
            value = self.value(node, source)
        elif (interpolation := _match_single(node)) and interpolation["key"]:  # of a group
            value = self._at(".".join([interpolation["key"], *remaining]), key)
        else:
            raise MissingKey(f"{key}: Interpolation key '{source}' not found")
        self.open.pop()
        return value

    def _spend(self, count: int) -> None:
        self.budget -= count
        if self.budget < 0:
            raise UserError("the config's interpolations expand to too many values; use another config")


def _match_single(text: Value) -> re.Match[str] | None:
    """Returns the match if a value is a string with a single interpolation and nothing else."""
    match = _PART.fullmatch(text) if isinstance(text, str) else None
    return match if match and not match["pairs"] and not match["literal"] else None


def reach(tree: Value, key: str) -> tuple[Value, list[str]]:
    """Follows a dotted key; stops at an interpolation and returns it with the remaining parts.

    Raises:
        KeyError: There is no such key.
    """
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if isinstance(tree, str) and "${" in tree:
            return tree, parts[depth:]
        if isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        elif isinstance(tree, dict) and part in tree:
            tree = tree[part]
        else:
            raise KeyError(key)
    return tree, []


def sources(tree: Tree, key: str) -> Iterator[str]:
    """Yields the keys that determine a value: the key itself, and all that it interpolates, also indirectly."""
    queue, visited = [key], set()
    while queue:
        key = queue.pop(0)
        if key in visited:
            continue
        visited.add(key)
        yield key
        try:
            text, remaining = reach(tree, key)
        except KeyError:
            continue
        queue += [".".join([name, *remaining]) for name in _interpolated_keys(text)]


def _interpolated_keys(value: Value) -> list[str]:
    """Returns the keys that a string, or the strings of a list, interpolate."""
    if isinstance(value, list):
        return [
            name
            for item in value
            for name in _interpolated_keys(list(item.values()) if isinstance(item, dict) else item)
        ]
    matches = _PART.finditer(value) if isinstance(value, str) else ()
    return [name for part in matches if not part["literal"] for name in re.findall(rf"\$\{{({_KEY})\}}", part[0])]


def origin(tree: Tree, key: str) -> str:
    """Returns the key where a value is set: the key itself, or the end of its chain of interpolations."""
    for _ in range(MAX_DEPTH):
        try:
            text, remaining = reach(tree, key)
        except KeyError:
            break
        if not (interpolation := _match_single(text)) or not interpolation["key"]:
            break
        key = ".".join([interpolation["key"], *remaining])
    return key


def origins(tree: Tree, faults: list[str]) -> list[str]:
    """Reports faults of interpolated values under the keys where these are set, one line per key.

    Faults of values that are computed from another faulty key are left out.

    Args:
        faults: Lines of the form "key: fault".
    """
    lines = [(key, origin(tree, key), fault) for key, _, fault in (line.partition(": ") for line in faults)]
    faulty_keys = {source for _, source, _ in lines}
    grouped: dict[str, list[str]] = {}
    for key, source, fault in lines:
        if not faulty_keys.intersection(list(sources(tree, source))[1:]):
            text = f"{source}: {fault}" if fault else key
            grouped.setdefault(source if key != source else text, []).append(text)
    # If a value is interpolated at several keys, report the narrowest type, unless the key itself has a fault.
    selected = {name: max(texts, key=lambda text: ("None" not in text, text)) for name, texts in grouped.items()}
    direct = {name.partition(": ")[0] for name in selected if name not in faulty_keys}
    return [text for name, text in selected.items() if name not in direct]


def walk(config: Tree, parent: str = "") -> Iterator[tuple[str, Value]]:
    """Yields each dotted key of a config with its value, groups before their keys."""
    for name, value in config.items():
        key = f"{parent}.{name}" if parent else str(name)
        yield key, value
        if isinstance(value, dict):
            yield from walk(value, key)


def transform(value: Any, change: Callable[[Tree, Tree, str], Any], path: str = "") -> Any:
    """Replaces each node in plain containers, innermost first, by ``change(node, original, path)``."""
    at = f"{path}." if path else ""
    if isinstance(value, list | tuple):
        return [transform(child, change, f"{at}{index}") for index, child in enumerate(value)]
    if not isinstance(value, dict):
        return value
    node = {key: transform(child, change, f"{at}{key}") for key, child in value.items()}
    return change(node, value, path) if "_target_" in node else node


def select(config: Value, key: str, default: Any = None) -> Any:
    """Returns the value at a dotted key of a resolved config."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return default
        config = config[part]
    return config


def put(config: Tree, key: str, value: Value) -> None:
    """Sets the value at a dotted key, in place."""
    *parents, name = key.split(".")
    for part in parents:
        config = cast(Tree, config.setdefault(part, {}))
    config[name] = value
