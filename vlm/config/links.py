"""Links of a config: the keys that each key feeds, kept so that later overrides reach all of them.

A resolved config has lost its interpolations: with ``data.source.root: ${data.root}`` resolved, an override of
``data.root`` alone would change nothing.
"""

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from vlm.errors import UserError

FED, COMPUTED = "fed", "computed"  # keys of a config that hold its links
# Sizes are said once; what follows from them is reckoned: ${sum:${data.max_len},-2}.
FORMULAS: dict[str, Callable[..., Any]] = {
    "sum": lambda *terms: sum(terms),
    "div": lambda whole, part: whole // part if part else whole,
}
_KEY = re.compile(r"(?<!\\)\$\{([A-Za-z_][\w.]*)\}")
_FORMULA = re.compile(rf"\$\{{({'|'.join(FORMULAS)}):(.*)\}}")


def links(tree: DictConfig) -> dict[str, Any]:
    """The links of a config that is not resolved, in plain containers.

    Returns:
        "fed": key -> keys that take its value (``data.root: [data.source.root]``), and "computed": of those, the ones
        that take it through a formula -> ``[sum, data.max_len, -2]``, or none where it is no formula of ours.
    """
    fed: dict[str, list[str]] = {}
    computed: dict[str, list[Any] | None] = {}
    for key, text in walk(OmegaConf.to_container(tree, resolve=False)):
        sources = _KEY.findall(text) if isinstance(text, str) else []
        for source in dict.fromkeys(sources):
            fed.setdefault(source, []).append(key)
        if sources and not _KEY.fullmatch(text):
            computed[key] = _formula(text)
    return {FED: fed, COMPUTED: computed}


def _formula(text: str) -> list[Any] | None:
    match = _FORMULA.fullmatch(text)
    terms = [_KEY.fullmatch(term) or re.fullmatch(r"-?\d+", term) for term in match[2].split(",")] if match else [None]
    if match is None or None in terms:
        return None
    return [match[1], *(term[1] if term.re is _KEY else int(term[0]) for term in terms if term)]


def split_links(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config without its links, and them alone."""
    own = {key: config[key] for key in (FED, COMPUTED) if key in config}
    return {key: value for key, value in config.items() if key not in own}, own


def without(links: dict[str, Any], groups: Collection[str]) -> dict[str, Any]:
    """The links, less those that lead into these groups."""
    kept = {
        source: [target for target in targets if not any(target.startswith(f"{group}.") for group in groups)]
        for source, targets in links.get(FED, {}).items()
    }
    return links | ({FED: {source: targets for source, targets in kept.items() if targets}} if links else {})


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two configs' links together; none where neither has any."""
    if not one and not other[FED]:
        return {}
    fed = {source: list(targets) for source, targets in one.get(FED, {}).items()}
    for source, targets in other[FED].items():
        fed[source] = list(dict.fromkeys([*fed.get(source, []), *targets]))
    return {FED: fed, COMPUTED: one.get(COMPUTED, {}) | other[COMPUTED]}


def feed(config: dict[str, Any], links: dict[str, Any], keys: Collection[str]) -> dict[str, list[str]]:
    """Passes the values of overridden keys on to all that they feed, directly or through others, in place.

    A key that is itself overridden keeps its value.

    Returns:
        Overridden key -> the keys that took its value.
    Raises:
        UserError: A key that they feed cannot be computed anew.
    """
    taken: dict[str, list[str]] = {}
    for key in keys:
        taken[key], waiting = [], [key]
        while waiting:
            for place, source, target in _places(links, waiting.pop()):
                if has(config, place) and place not in (*keys, *taken[key]):
                    holder, name = _holder(config, place)
                    holder[name] = _value(config, links, source, target)
                    taken[key].append(place)
                    waiting.append(place)
    return taken


def _places(links: dict[str, Any], key: str) -> Iterator[tuple[str, str, str]]:
    """Yields (key that takes a value, key of that value, the link's own target) for all links that a key is part of."""
    for source, targets in links.get(FED, {}).items():
        if key.startswith(f"{source}."):
            yield from ((f"{target}{key.removeprefix(source)}", key, target) for target in targets)
        elif key == source or source.startswith(f"{key}."):
            yield from ((target, source, target) for target in targets)


def _value(config: dict[str, Any], links: dict[str, Any], source: str, target: str) -> Any:
    if target not in links.get(COMPUTED, {}):
        return select(config, source)
    try:
        name, *terms = links[COMPUTED][target]
        return FORMULAS[name](*(select(config, term) if isinstance(term, str) else term for term in terms))
    except (KeyError, TypeError, ValueError) as fault:
        raise UserError(
            f"{source}: {target} was computed of it and cannot be again; give {target}=VALUE too"
        ) from fault


def origins(config: dict[str, Any], faults: list[str]) -> list[str]:
    """Faults of values that were interpolated, as faults of the keys that they come from, each key once.

    A value that was computed of a key that is at fault itself is left out.

    Args:
        config: A resolved config, with its links.
        faults: Lines of the form "key: fault".
    """
    lines = [(key, *_origin(config, key), rest) for key, _, rest in (line.partition(": ") for line in faults)]
    wrong = {origin for _, origin, _, _ in lines}
    named: dict[str, list[str]] = {}
    for key, origin, computed_of, rest in lines:
        if not wrong & set(computed_of):
            text = f"{origin}: {rest}" if rest else key
            named.setdefault(origin if key != origin else text, []).append(text)
    # Of the types that the places of a value ask for, the narrowest; a fault of the key itself has its own line.
    chosen = {origin: max(texts, key=lambda text: ("None" not in text, text)) for origin, texts in named.items()}
    own = {text.partition(": ")[0] for text in chosen if text not in wrong}
    return [text for origin, text in chosen.items() if origin not in own]


def _origin(config: dict[str, Any], key: str) -> tuple[str, list[str]]:
    """The key that a value was interpolated from, and those that it was computed of."""
    computed_of = []
    for source, targets in config.get(FED, {}).items():
        for target in targets:
            place = f"{source}{key.removeprefix(target)}"
            if not f"{key}.".startswith(f"{target}."):
                continue
            if target in config.get(COMPUTED, {}):
                computed_of.append(source)
            elif select(config, place) == select(config, key):
                return _origin(config, place)
    return key, computed_of


def walk(config: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each dotted key of a config with its value, those of groups before those within."""
    for name, value in config.items():
        key = f"{parent}.{name}" if parent else str(name)
        yield key, value
        if isinstance(value, dict):
            yield from walk(value, key)


def transform(value: Any, change: Callable[[dict[str, Any], dict[str, Any], str], Any], path: str = "") -> Any:
    """Plain containers with each node, innermost first, in the form that ``change(node, original, path)`` gives it."""
    at = f"{path}." if path else ""
    if isinstance(value, list | tuple):
        return [transform(child, change, f"{at}{index}") for index, child in enumerate(value)]
    if not isinstance(value, dict):
        return value
    node = {key: transform(child, change, f"{at}{key}") for key, child in value.items()}
    return change(node, value, path) if "_target_" in node else node


def has(config: Any, key: str) -> bool:
    """True where a config has a key."""
    holder, name = _holder(config, key)
    return isinstance(holder, dict) and name in holder


def _holder(config: Any, key: str) -> tuple[Any, str]:
    parent, _, name = key.rpartition(".")
    return (select(config, parent) if parent else config), name


def select(config: Any, key: str, default: Any = None) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return default
        config = config[part]
    return config
