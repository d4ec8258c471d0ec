"""Overrides, the KEY=VALUE of a command line: read by Hydra's grammar, quoted where that would misread a path, and
applied to a config that was saved."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, ValueType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationToMissingValueError, OmegaConfBaseException

from vlm.config.links import feed, has, select, split_links, without
from vlm.config.target import arguments, find
from vlm.config.untrusted import readable
from vlm.errors import UserError, did_you_mean, nearest

RESUMABLE = ("trainer", "logger", "callbacks", "data.num_workers", "compile", "activation_checkpointing")
_PATH_KEYS = ("root", "path")  # by convention a folder and a file
_ACTIVE = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # an interpolation that no backslash makes literal
_FUNCTION = re.compile(r"\w+\(.*\)", re.DOTALL)


def parse(override: str) -> Override | None:
    """Reads an override by Hydra's grammar; None where it does not follow it."""
    try:
        return _parser().parse_override(override)
    except Exception:  # the grammar's functions raise whatever their Python does
        return None


def quote(override: str, sweeping: bool = False) -> str:
    """Quotes the value of an override where Hydra's grammar would refuse it or read a path as something else.

    Args:
        override: As the shell delivers it.
        sweeping: Whether commas may stand between the values of a sweep.
    """
    key, _, value = override.partition("=")
    if not value or _is_plain(key, value, parse(override), sweeping):
        return override
    return f"{key}={QuotedString(_literal(value, force=os.path.lexists(value)), Quote.single).with_quotes()}"


def split_option(argv: list[str], name: str = "resume") -> tuple[str | None, list[str]]:
    """Takes ``NAME=VALUE`` out of a command line, of an option that is no value of the config.

    Raises:
        UserError: It stands there twice.
    """
    found = [arg for arg in argv if arg.lstrip("+").startswith(f"{name}=")]
    if len(found) > 1:
        raise UserError(f"{name} is given {len(found)} times ({' '.join(found)}); give it once")
    if not found:
        return None, argv
    value = found[0].partition("=")[2]
    parsed = parse(found[0])
    if parsed is not None and value[:1] in ("'", '"') and not os.path.lexists(value):
        value = str(parsed.value())
    rest = [arg for arg in argv if arg is not found[0]]
    return (None if value in ("", "null") else value), rest


def check_resume_overrides(overrides: list[str], saved_config: dict[str, Any]) -> dict[str, Any]:
    """The config that a resumed run goes on with: the saved one, with the values that may change.

    Raises:
        UserError: Other values are given, or keys that there are not.
    """
    faults = [fault for text in overrides for fault in _resume_fault(text, saved_config)]
    if faults:
        raise UserError("\n".join(faults))
    config, taken = apply(saved_config, overrides)
    fixed = [(key, place) for key, places in taken.items() for place in places if not _resumable(place)]
    for key, place in fixed:
        if select(config, place) != select(saved_config, place):
            raise UserError(f"{key}: {place} is made of it, which cannot change in a resumed run; leave it out")
    return config


def apply(
    config: dict[str, Any], overrides: list[str], chosen: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Applies overrides to a config of plain containers, as Hydra would to one that it composes.

    Args:
        config: A resolved config, with its links.
        overrides: KEY=VALUE, quoted or not.
        chosen: Key -> what takes its place first; its interpolations are resolved in the config.
    Returns:
        The config, and for each overridden key those that it feeds.
    Raises:
        UserError: With a line for each that cannot be applied.
    """
    config, links = split_links(config)
    tree = OmegaConf.create(escape(config))
    for key, node in (chosen or {}).items():
        OmegaConf.update(tree, key, node, merge=False, force_add=True)
    OmegaConf.set_struct(tree, True)
    faults, keys = [], []
    for text in overrides:
        parsed = parse(quote(text))
        if parsed is None or parsed.is_sweep_override():
            faults.append(f"{text}: is not of the form KEY=VALUE with one value")
            continue
        try:
            _apply(tree, parsed)
            keys.append(parsed.key_or_group)
        except (OmegaConfBaseException, AttributeError, TypeError):
            faults.append(unknown_key(parsed.key_or_group, config))
    if faults:
        raise UserError("\n".join(faults))
    with readable(overrides):
        applied = plain(tree)
    links = without(links, [*(chosen or ())])  # of a group that was chosen anew, links are live in its own tree
    return {**applied, **links}, feed(applied, links, keys)


def check_effective(
    before: dict[str, Any], after: dict[str, Any], taken: Mapping[str, list[str]], unread: Callable[[str], bool]
) -> None:
    """Refuses overrides that change nothing.

    Args:
        before: The config that was saved.
        after: The same with the overrides applied.
        taken: Overridden key -> the keys that took its value.
        unread: Whether the command does not read a key.
    Raises:
        UserError: With a line for each override that changes nothing.
    """
    faults = []
    for key, places in taken.items():
        read = [place for place in (key, *places) if not unread(place)]
        if not read:
            faults.append(f"{key}: changes nothing here, for the checkpoint's own stands; leave it out")
        elif all(select(before, place) == select(after, place) and has(after, place) for place in read):
            faults.append(f"{key}: is {_short(select(before, key))} already and changes nothing; leave it out")
    if faults:
        raise UserError("\n".join(faults))


def plain(tree: DictConfig) -> dict[str, Any]:
    """Resolves a config to plain containers.

    Raises:
        UserError: A value is missing (``???``), or an interpolation leads nowhere.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(tree))
        if missing:
            raise UserError("\n".join(f"{key}: has no value; give {key}=VALUE" for key in missing))
        container = OmegaConf.to_container(tree, resolve=True)
    except InterpolationToMissingValueError as error:
        key = str(error).splitlines()[0].rpartition(": ")[2]
        raise UserError(f"{key}: has no value; give {key}=VALUE") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}") from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def escape(value: Any) -> Any:
    """Makes every ``${`` in the strings of plain containers literal: they have been resolved before."""
    if isinstance(value, dict):
        return {key: escape(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [escape(child) for child in value]
    return _literal(value, force=True) if isinstance(value, str) else value


def unknown_key(key: str, config: dict[str, Any], groups: Collection[str] = ()) -> str:
    """Says that a config has no such key, with the nearest that it has.

    Args:
        key: The dotted path that was given.
        config: Plain containers.
        groups: Config groups, which may stand at the left of ``=`` too.
    """
    node, parts = config, key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, dict):
            return f"{'.'.join(parts[:depth])}: is {node!r} and has no {part}"
        if part not in node:
            break
        node = node[part]
    known = {str(name) for name in node if name != "_target_"} if isinstance(node, dict) else set()
    settable = _settable(node)
    if part in settable and depth == len(parts) - 1:
        return f"{key}: is not in this config; write +{key}=VALUE to add it"
    known |= set(settable) if depth else set(groups)
    tail = f".{key.replace('/', '.')}"
    elsewhere = sorted(path for path in _paths(config) if f".{path}".endswith(tail))[:3]
    alike = " or ".join(elsewhere) or nearest(part, known)
    return f"{'.'.join(parts[: depth + 1])}: unknown{did_you_mean(alike)}"


def _settable(node: Any) -> list[str]:
    """The arguments of what a node names; none where it is no node, or cannot be built."""
    try:
        return list(arguments(find(node["_target_"]))) if isinstance(node, dict) and "_target_" in node else []
    except UserError:
        return []


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _is_plain(key: str, value: str, parsed: Override | None, sweeping: bool) -> bool:
    """Whether Hydra reads a value as whoever typed it meant it."""
    if parsed is None:
        return False
    exists = os.path.lexists(value)
    names_path = re.split(r"[.+~]", key)[-1] in _PATH_KEYS
    like_path = exists or names_path or os.sep in value
    if parsed.is_sweep_override():
        listed = parsed.value_type is ValueType.SIMPLE_CHOICE_SWEEP
        return not exists if sweeping or not listed else not like_path
    meant = parsed.value()
    if meant is None or isinstance(meant, list | dict) or value[0] in "'\"" or _FUNCTION.fullmatch(value):
        return not exists
    if isinstance(meant, str):
        # Hydra writes values out again for the jobs of a sweep: what it would escape there is quoted here.
        return not like_path or meant == parsed.get_value_element_as_str() == value
    return not names_path


def _literal(value: str, force: bool) -> str:
    """Escapes each ``${`` for OmegaConf: always with ``force``, else where it cannot be an interpolation."""
    if "${" not in value:
        return value
    if not force and _ACTIVE.search(value):
        try:
            OmegaConf.create({"value": value})
            return value
        except GrammarParseError:
            pass
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)


def _resume_fault(text: str, saved: dict[str, Any]) -> Iterator[str]:
    if text.startswith("-"):
        yield f"{text}: does not go with resume, which takes the saved config as it is"
        return
    parsed = parse(quote(text))
    if parsed is None:
        yield f"{text}: is not of the form KEY=VALUE"
        return
    key = parsed.key_or_group
    if not _resumable(key):
        given = _short(None if parsed.is_delete() else text.partition("=")[2])
        before = _short(select(saved, key.replace("/", "."), "not set"))
        yield (
            f"{key}: was {before} and cannot become {given} in a resumed run; leave it out, or "
            f"start a new run (only {', '.join(RESUMABLE)} may change)"
        )
    elif key in RESUMABLE and isinstance(parsed.value(), str):
        yield f"{text}: a group cannot be chosen anew in a resumed run; set its values, such as trainer.accelerator=cpu"


def _resumable(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in RESUMABLE)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("_target_", "a group of values")
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _apply(tree: DictConfig, parsed: Override) -> None:
    key, value = parsed.key_or_group, parsed.value()
    if parsed.is_delete():
        parent, _, name = key.rpartition(".")
        holder = OmegaConf.select(tree, parent) if parent else tree
        OmegaConf.set_struct(tree, False)
        try:
            del holder[name]
        finally:
            OmegaConf.set_struct(tree, True)
    else:
        adding = parsed.is_add() or parsed.is_force_add()
        OmegaConf.update(tree, key, value, merge=True, force_add=adding)


def _paths(config: dict[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
