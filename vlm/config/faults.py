"""Says in a line what is wrong with a config that Hydra will not compose, and looks for further faults at once."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from vlm.config.links import links
from vlm.config.override import parse, plain, unknown_key
from vlm.errors import UserError, did_you_mean, nearest

Compose = Callable[[list[str]], DictConfig]
Check = Callable[[dict[str, Any]], None]


def checked(config: DictConfig, check: Check | None, suit: Check | None = None) -> dict[str, Any]:
    """Resolves a config to plain containers and checks it; ``compose`` describes the arguments.

    Raises:
        UserError: With a line for each fault.
    """
    try:
        resolved = {**plain(config), **links(config)}
    except UserError as fault:
        if suit and isinstance(fault.__cause__, InterpolationKeyError):
            suit(dict(OmegaConf.to_container(config, resolve=False)))  # type: ignore[arg-type]
        raise
    if check:
        check(resolved)
    return resolved


def option_faults(overrides: list[str], folders: list[Path]) -> tuple[list[str], list[str] | None]:
    """Looks the options that overrides choose up in the config folders.

    Hydra would do so too, but passes over what an optional group does not have.

    Returns:
        A line for each option that is not there, and the overrides with the nearest one in its place: None where there
        is none near.
    """
    found: list[str] = []
    mended: list[str] = []
    hopeless = False
    for text in overrides:
        override = parse(text)
        group, wanted = (override.key_or_group, _options_wanted(override)) if override else ("", [])
        options = _options(group.replace(".", "/"), folders)
        if "." in group and set(wanted) & set(options):
            group = group.replace(".", "/")
            found.append(f"{text}: an option is chosen with a slash; write {group}={wanted[0]}")
            text = f"{group}={wanted[0]}"
        elif options and "." not in group:
            for option in [option for option in wanted if option not in options]:
                near = nearest(option, options)
                found.append(f"{group}={option}: unknown; choose from {', '.join(options)}{did_you_mean(near)}")
                hopeless |= not near
                text = f"{text.partition('=')[0]}={near}"
        mended.append(text)
    return found, None if hopeless else mended


def explain(
    error: Exception | None, overrides: list[str], compose: Compose, groups: list[str], check: Check | None
) -> list[str]:
    """A line or two for each fault of a config, all that can be found.

    Args:
        error: What Hydra raised, for when composing the config again shows no fault.
        overrides: As Hydra was given them.
        compose: Composes the config with fewer overrides, so that all that are wrong are found, one by one.
        groups: Names of the config groups.
        check: Raises a UserError with further faults of a config that could be composed.
    """
    pending = [_first_of_sweep(text) for text in overrides]
    tree: dict[str, Any] = {}
    further: list[str] = []
    culprit = _culprit(error, pending) if error else None
    errors = [error] if error and culprit else []
    while True:
        pending = [text for text in pending if text is not culprit]
        try:
            config = compose(pending)
            tree, resolved = _tree(config)
        except Exception as another:  # any of Hydra's, OmegaConf's and the YAML reader's
            errors.append(another)
            culprit = _culprit(another, pending)
            if culprit is None:
                break
        else:
            further = _faults(config, check) if resolved else []
            break
    if error is not None and not errors:  # it lies in the command line's flags, or in one job of a sweep
        return [_describe(error, tree, groups)]
    return list(dict.fromkeys(_describe(fault, tree, groups) for fault in errors)) + further


def group_names(folders: list[Path]) -> list[str]:
    """The config groups of these folders."""
    return sorted({path.relative_to(f).as_posix() for f in folders for path in f.rglob("*") if path.is_dir()})


def not_utf8(folders: list[Path]) -> str:
    """The first config file of these folders that cannot be decoded."""
    for path in (path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return str(path)
    return "a config file"


def _options(group: str, folders: list[Path]) -> list[str]:
    """The options of a group; none where it is no group."""
    if not re.fullmatch(r"[\w/-]+", group):
        return []
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})


def _options_wanted(override: Override) -> list[str]:
    if override.is_delete():
        return []
    value: Any = override.value()
    values = value.list if hasattr(value, "list") else value if isinstance(value, list) else [value]
    texts = [getattr(item, "text", item) for item in values]  # a quoted string of a sweep has its text inside
    return [text for text in texts if isinstance(text, str) and "/" not in text and "${" not in text]


def _first_of_sweep(text: str) -> str:
    override = parse(text)
    if override is None or not override.is_sweep_override() or not override.is_discrete_sweep():
        return text
    return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()), '')}"


def _culprit(error: Exception, overrides: list[str]) -> str | None:
    """The override that an error speaks of."""
    text = f"{error}\n{getattr(error, 'override', '')}"
    keys = {override: re.split("=", override.lstrip("+~"))[0] for override in overrides}
    named = [override for override in overrides if override in text]
    named += [override for override in overrides if f"'{keys[override]}'" in text]
    return max(named, key=len, default=None)


def _faults(config: DictConfig, check: Check | None) -> list[str]:
    try:
        checked(config, check)
    except UserError as fault:
        return [str(fault)]
    return []


def _tree(config: DictConfig) -> tuple[dict[str, Any], bool]:
    """The config in plain containers, and whether it could be resolved."""
    try:
        return dict(OmegaConf.to_container(config, resolve=True)), True  # type: ignore[arg-type]
    except OmegaConfBaseException:
        return dict(OmegaConf.to_container(config, resolve=False)), False  # type: ignore[arg-type]


def _describe(error: Exception, tree: dict[str, Any], groups: list[str]) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = error.__cause__ or error
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        return f"{mark.name if mark else 'YAML'}, line {mark.line + 1 if mark else '?'}: {error.problem}"
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        near = did_you_mean(nearest(option, error.options))
        return f"{group}={option}: unknown; choose from {', '.join(error.options)}{near}"
    if override := getattr(error, "override", None):
        return f"{override}: cannot be read as KEY=VALUE; put quotes around the value where it holds , = ( [ or {{"
    if match := re.match(r"Could not override '([^']+)'\. No match in the defaults list", lines[0]):
        return f"{match[1]}: is not among the defaults; write +{match[1]}=OPTION to add it"
    if match := re.match(r"Could not append to config. An item is already at '([^']+)'", lines[0]):
        return f"{match[1]}: is in the config already; leave out the + to change it"
    if match := re.match(r"Could not (?:override|delete from config\.) '([^']+)'", lines[0]):
        return f"{match[1]}: unknown to Hydra" if match[1].startswith("hydra.") else unknown_key(match[1], tree, groups)
    if match := re.match(r"Ambiguous value for argument '(.*)'", lines[0]):
        return f"{match[1]}: has several values; add -m to run each, or write [...] around them for a list"
    if match := re.match(r"You must specify '([^']+)'", lines[0]):
        return f"{match[1]}: no option is chosen; choose {match[1]}= one of {', '.join(lines[2:])}"
    if isinstance(cause, OmegaConfBaseException):
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        key = f"{cause.full_key}: " if cause.full_key else ""
        return f"{key}{reason}" if cause is error or not str(error) else f"{lines[0]}: {reason}"
    if lines[0].endswith(":"):
        lines[0] = " ".join(lines[:2])
    plain = isinstance(error, HydraException | ValueError | OSError)
    return lines[0] if plain else f"{type(error).__name__}: {lines[0]}"
