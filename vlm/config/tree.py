"""A config as a tree of plain containers: its keys, its interpolations, and what these resolve to.

A stored config keeps its interpolations, so that an override of a key reaches all that refer to it. It may interpolate
only keys of the config and two formulas, no environment variables and no other resolvers. The grammar is OmegaConf's.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vlm.errors import UserError

# Sizes are set once; values that depend on them are computed: ${sum:${data.max_len},-2}.
FORMULAS: dict[str, Callable[..., Any]] = {
    "sum": lambda *terms: sum(terms),
    "div": lambda whole, part: whole // part if part else whole,
}
MISSING = "???"
MAX_VALUES = 100_000  # of a resolved config, including the characters of joined strings
MAX_DEPTH = 50  # of nested interpolations

_KEY = r"[A-Za-z_]\w*(?:\.\w+)*"
_TERM = rf"(?:\$\{{{_KEY}\}}|-?\d+)"
# An even number of backslashes before "${" means half as many; an odd one makes "${" literal.
_PART = re.compile(
    rf"(?<!\\)(?P<pairs>(?:\\\\)*)(?:(?P<literal>\\\$\{{)|\$\{{(?P<key>{_KEY})\}}"
    rf"|\$\{{(?P<formula>{'|'.join(FORMULAS)}):(?P<terms>{_TERM}(?:,{_TERM})*)\}})"
)


class Config(dict[str, Any]):
    """A resolved config in plain containers.

    Attributes:
        tree: The config with its interpolations.
        typed: The command-line arguments that it was composed from.
    """

    tree: dict[str, Any]
    typed: Sequence[str] = ()


class MissingKey(UserError):
    """An interpolation leads to a key that is not there."""


def resolve(tree: dict[str, Any]) -> Config:
    """Resolves the interpolations of a tree.

    Raises:
        UserError: A value is missing (``???``), or an interpolation leads nowhere, is circular, is neither a key nor
            one of FORMULAS, or expands to too many values.
    """
    resolution = _Resolution(tree)
    try:
        config = Config(resolution.value(tree, ""))
    except RecursionError as fault:
        raise UserError("the config's interpolations are nested too deeply; use another config") from fault
    if resolution.missing:
        raise UserError("\n".join(f"{key}: has no value; give {key}=VALUE" for key in sorted(resolution.missing)))
    config.tree = tree
    return config


def is_plain(text: str) -> bool:
    """Returns True for a string whose only interpolations are of keys and FORMULAS."""
    return "${" not in _PART.sub(lambda part: " " if part["literal"] else "", text)


def escape(value: Any) -> Any:
    """Escapes every ``${`` in the strings of plain containers."""
    if isinstance(value, dict):
        return {key: escape(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [escape(child) for child in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


class _Resolution:
    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree, self.left = tree, MAX_VALUES
        self.open: list[str] = []  # keys being interpolated, outermost first
        self.missing: set[str] = set()

    def value(self, value: Any, key: str) -> Any:
        self._spend(1)
        if isinstance(value, dict):
            return {name: self.value(child, f"{key}.{name}" if key else str(name)) for name, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(child, f"{key}.{index}") for index, child in enumerate(value)]
        if value == MISSING:
            self.missing.add(key)
        return self._text(value, key) if isinstance(value, str) and "${" in value else value

    def _text(self, text: str, key: str) -> Any:
        if not is_plain(text):
            raise UserError(f"{key}: {text!r:.80} interpolates more than keys, sum and div; give the value itself")
        if whole := _whole(text):
            return self._part(whole, key)

        def part(match: re.Match[str]) -> str:
            return match["pairs"][::2] + ("${" if match["literal"] else str(self._part(match, key)))

        text = _PART.sub(part, text)
        self._spend(len(text))
        return text

    def _part(self, match: re.Match[str], key: str) -> Any:
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

    def _at(self, source: str, key: str) -> Any:
        if source in self.open or len(self.open) > MAX_DEPTH:
            raise UserError(f"{key}: the interpolation of {source:.80} is circular")
        try:
            node, rest = reach(self.tree, source)
        except KeyError as fault:
            raise MissingKey(f"{key}: Interpolation key '{source}' not found") from fault
        self.open.append(source)
        value = self._at(_joined(node, rest, source, key), key) if rest else self.value(node, source)
        self.open.pop()
        return value

    def _spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise UserError("the config's interpolations expand to too many values; use another config")


def _joined(text: str, rest: list[str], source: str, key: str) -> str:
    if not (whole := _whole(text)) or not whole["key"]:
        raise MissingKey(f"{key}: Interpolation key '{source}' not found")
    return ".".join([whole["key"], *rest])


def _whole(text: Any) -> re.Match[str] | None:
    """Returns the match if a string is a single interpolation and nothing else."""
    match = _PART.fullmatch(text) if isinstance(text, str) else None
    return match if match and not match["pairs"] and not match["literal"] else None


def reach(tree: Any, key: str) -> tuple[Any, list[str]]:
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


def sources(tree: dict[str, Any], key: str) -> Iterator[str]:
    """Yields the keys that determine a value: its own, and all that it interpolates directly or indirectly."""
    waiting, seen = [key], set()
    while waiting:
        key = waiting.pop(0)
        if key in seen:
            continue
        seen.add(key)
        yield key
        try:
            text, rest = reach(tree, key)
        except KeyError:
            continue
        waiting += [".".join([name, *rest]) for name in _names(text)]


def _names(value: Any) -> list[str]:
    """Returns the keys that a string, or the strings of a list, interpolate."""
    if isinstance(value, list):
        return [name for item in value for name in _names(list(item.values()) if isinstance(item, dict) else item)]
    found = _PART.finditer(value) if isinstance(value, str) else ()
    return [name for part in found if not part["literal"] for name in re.findall(rf"\$\{{({_KEY})\}}", part[0])]


def origin(tree: dict[str, Any], key: str) -> str:
    """Returns the key where a value is set: its own, or the end of the chain that it is interpolated from."""
    for _ in range(MAX_DEPTH):
        try:
            text, rest = reach(tree, key)
        except KeyError:
            break
        if not (whole := _whole(text)) or not whole["key"]:
            break
        key = ".".join([whole["key"], *rest])
    return key


def origins(tree: dict[str, Any], faults: list[str]) -> list[str]:
    """Renames faults of interpolated values to the keys where these are set, one line per key.

    Faults of values computed from a key that is at fault itself are left out.

    Args:
        faults: Lines of the form "key: fault".
    """
    lines = [(key, origin(tree, key), rest) for key, _, rest in (line.partition(": ") for line in faults)]
    wrong = {place for _, place, _ in lines}
    named: dict[str, list[str]] = {}
    for key, place, rest in lines:
        if not wrong.intersection(list(sources(tree, place))[1:]):
            text = f"{place}: {rest}" if rest else key
            named.setdefault(place if key != place else text, []).append(text)
    # Where a value is used at several places, the narrowest expected type; a fault of the key itself has its own line.
    chosen = {place: max(texts, key=lambda text: ("None" not in text, text)) for place, texts in named.items()}
    own = {text.partition(": ")[0] for text in chosen if text not in wrong}
    return [text for place, text in chosen.items() if place not in own]


def walk(config: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each dotted key of a config with its value, groups before their keys."""
    for name, value in config.items():
        key = f"{parent}.{name}" if parent else str(name)
        yield key, value
        if isinstance(value, dict):
            yield from walk(value, key)


def transform(value: Any, change: Callable[[dict[str, Any], dict[str, Any], str], Any], path: str = "") -> Any:
    """Replaces each node in plain containers, innermost first, by ``change(node, original, path)``."""
    at = f"{path}." if path else ""
    if isinstance(value, list | tuple):
        return [transform(child, change, f"{at}{index}") for index, child in enumerate(value)]
    if not isinstance(value, dict):
        return value
    node = {key: transform(child, change, f"{at}{key}") for key, child in value.items()}
    return change(node, value, path) if "_target_" in node else node


def select(config: Any, key: str, default: Any = None) -> Any:
    """The value at a dotted key of a resolved config."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return default
        config = config[part]
    return config


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value at a dotted key, in place."""
    *parents, name = key.split(".")
    for part in parents:
        config = config.setdefault(part, {})
    config[name] = value
