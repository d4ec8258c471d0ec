"""Overrides (KEY=VALUE): parsed with Hydra's grammar, quoted where it would misread a path, and applied to a config."""

import os
import re
from collections.abc import Collection, Sequence
from typing import Any, cast, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, ValueType
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
)

from vlm.config.build import arguments_of, injects
from vlm.config.target import signature
from vlm.config.tree import MissingKey, Tree, Value, escape, is_plain, origin, reach, select, walk
from vlm.errors import UserError, did_you_mean, find_similar

_PATH_KEYS = ("root", "path")  # keys that by convention hold a folder and a file
_ACTIVE = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # an interpolation that is not escaped
_FUNCTION = re.compile(r"\w+\(.*\)", re.DOTALL)


def parse(override: str) -> Override | None:
    """Parses an override with Hydra's grammar; returns None if it is invalid."""
    try:
        return OverridesParser.create().parse_override(override)
    except Exception:  # functions of the grammar may raise anything
        return None


def read(override: str, sweeping: bool = False) -> Override | None:
    """Parses an override from a command line, quoted where necessary; returns None if it is invalid."""
    return parse(quote(override, sweeping))


def quote(override: str, sweeping: bool = False) -> str:
    """Quotes the value of an override if Hydra's grammar would reject it or misread a path.

    Args:
        override: The argument of the command line.
        sweeping: Whether commas may separate the values of a sweep.
    """
    key, _, value = override.partition("=")
    if not value or _is_read_as_intended(key, value, parse(override), sweeping):
        return override
    value = escape(value) if os.path.lexists(value) else _escape_literal(value)
    return f"{key}={QuotedString(value, Quote.single).with_quotes()}"


def to_tree(config: DictConfig) -> Tree:
    """Converts a config or a group of it to plain containers that keep its interpolations."""
    return cast(Tree, OmegaConf.to_container(config, resolve=False))


def update(tree: DictConfig, overrides: Sequence[Override], groups: Collection[str] = ()) -> list[str]:
    """Applies overrides to a config in place.

    Args:
        groups: Names of config groups, which are also valid keys.
    Returns:
        A line for each override that cannot be applied.
    """
    faults = []
    before = to_tree(tree)
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if (source := _find_interpolation(before, key)) is not None:
            faults.append(f"{key}: is interpolated from {source}; set that key instead")
            continue
        parent = OmegaConf.select(tree, key.rpartition(".")[0]) if "." in key else tree
        try:
            if parent is not None and not OmegaConf.is_config(parent):  # OmegaConf would replace it with a dict
                raise TypeError
            if override.is_delete():
                with open_dict(tree):
                    del parent[key.rpartition(".")[2]]
            elif override.is_add() and not isinstance(value, dict | list) and OmegaConf.select(tree, key) is not None:
                faults.append(f"{key}: is already in the config; leave out the + to change it")
            else:
                adds = override.is_add() or override.is_force_add()
                merges = True
                if isinstance(value, dict):  # it replaces the old one if the argument is annotated as dict | ...
                    argument = arguments_of(cast(Tree, parent), signature).get(key.rpartition(".")[2])
                    options = () if argument is None else get_args(argument.annotation)
                    merges = not any(get_origin(option) is dict for option in options)
                OmegaConf.update(tree, key, value, merge=merges, force_add=adds)
        except (OmegaConfBaseException, AttributeError, TypeError):
            config = to_tree(tree)
            if isinstance(value, list) and isinstance(select(config, key, None), dict):
                faults.append(f"{key}: is a group of keys and cannot be set to a list; set its keys")
            else:
                faults.append(unknown_key(key, config, groups))
    return faults


def _find_interpolation(config: Tree, key: str) -> str | None:
    """Returns the key where a value in an interpolated group is set; None if the group is not interpolated."""
    try:
        return origin(config, key) if reach(config, key)[1] else None
    except KeyError:
        return None


def resolve_custom_interpolations(tree: DictConfig) -> Tree:
    """Converts a config to plain containers, with all interpolations resolved except those of keys and FORMULAS.

    Raises:
        UserError: An interpolation refers to a missing key.
    """
    try:
        return {key: _resolve_value(value, tree, key) for key, value in to_tree(tree).items()}
    except InterpolationToMissingValueError as error:
        key = str(error).splitlines()[0].rpartition(": ")[2]
        raise UserError(f"{key}: has no value; give {key}=VALUE") from error
    except OmegaConfBaseException as error:
        kind = MissingKey if isinstance(error, InterpolationKeyError) else UserError
        raise kind(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}") from error


def _resolve_value(raw: Value, parent: Any, key: str | int) -> Value:
    if isinstance(raw, dict):
        return {name: _resolve_value(child, parent[key], name) for name, child in raw.items()}
    if isinstance(raw, list):
        return [_resolve_value(child, parent[key], index) for index, child in enumerate(raw)]
    if not isinstance(raw, str) or is_plain(raw):
        return raw
    value = parent[key]
    return escape(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)


def unknown_key(key: str, config: Tree, groups: Collection[str] = ()) -> str:
    """Returns the error for an unknown key, with a suggestion."""
    parts = key.split(".")
    node: Value = config
    for depth, part in enumerate(parts):
        if not isinstance(node, dict):
            return f"{'.'.join(parts[:depth])}: is {node!r} and has no {part}"
        if part not in node:
            break
        node = node[part]
    names = {str(name) for name in node if name != "_target_"} if isinstance(node, dict) else set()
    settable = arguments_of(node)
    if depth == len(parts) - 1 and injects(node, part):
        return f"{key}: is set by the program; remove it"
    if part in settable and depth == len(parts) - 1:
        return f"{key}: is not in this config; write +{key}=VALUE to add it"
    names |= set(settable) if depth else set(groups)
    tail = f".{key.replace('/', '.')}"
    elsewhere = sorted(path for path, _ in walk(config) if f".{path}".endswith(tail))[:3]
    if key in ("data.path", "data.root"):
        path_keys = [
            name for name in ("data.root", "data.path", "data.source.sources") if select(config, name, key) != key
        ]
        remedy = (
            f"it has {' and '.join(path_keys)}"
            if path_keys
            else "choose data that are read from files, such as data=captions"
        )
        return f"{key}: not a key of this data set; {remedy}"  # generated data have neither
    suggestion = " or ".join(elsewhere) or find_similar(part, names)
    return f"{'.'.join(parts[: depth + 1])}: unknown{did_you_mean(suggestion)}"


def _is_read_as_intended(key: str, value: str, parsed: Override | None, sweeping: bool) -> bool:
    """Returns True if Hydra reads a value as intended."""
    if parsed is None:
        return False
    exists = os.path.lexists(value)
    names_path = re.split(r"[.+~]", key)[-1] in _PATH_KEYS
    is_path_like = exists or names_path or os.sep in value
    if parsed.is_sweep_override():
        has_commas = parsed.value_type is ValueType.SIMPLE_CHOICE_SWEEP
        return not exists if sweeping or not has_commas else not is_path_like
    parsed_value = parsed.value()
    if parsed_value is None or isinstance(parsed_value, list | dict) or value[0] in "'\"" or _FUNCTION.fullmatch(value):
        return not exists
    if isinstance(parsed_value, str):
        # Hydra formats values again for the jobs of a sweep, so a value that it would escape must be quoted, and it
        # strips surrounding spaces, such as those of the delimiter ' '.
        return value == value.strip() and (
            not is_path_like or parsed_value == parsed.get_value_element_as_str() == value
        )
    return not names_path


def _escape_literal(value: str) -> str:
    """Escapes ``${`` for OmegaConf if it cannot be an interpolation."""
    if _ACTIVE.search(value):
        try:
            OmegaConf.create({"value": value})
            return value
        except GrammarParseError:
            pass
    return str(escape(value))
