"""Overrides that a run, its resumption and its evaluation accept beyond those of a new config."""

import os
from collections.abc import Callable, Iterator
from typing import Any

from vlm.config.compose import override
from vlm.config.override import parse, quote
from vlm.config.tree import Config, select, sources, walk
from vlm.errors import UserError

RESUMABLE = ("trainer", "logger", "callbacks", "data.num_workers", "compile", "activation_checkpointing")


def split_option(argv: list[str], name: str) -> tuple[str | None, list[str]]:
    """Takes ``NAME=VALUE`` out of a command line, of a key that decides what the others are applied to.

    Raises:
        UserError: It stands there twice.
    """
    options = [arg for arg in argv if arg.lstrip("+").startswith(f"{name}=")]
    if len(options) > 1:
        raise UserError(f"{name} is given {len(options)} times ({' '.join(options)}); give it once")
    if not options:
        return None, argv
    value = options[0].partition("=")[2]
    parsed = parse(options[0])
    if parsed is not None and value[:1] in ("'", '"') and not os.path.lexists(value):
        value = str(parsed.value())
    return (None if value in ("", "null") else value), [arg for arg in argv if arg is not options[0]]


def check_resume_overrides(overrides: list[str], saved: Config) -> Config:
    """The config that a resumed run goes on with: the saved one, with the values that may change.

    Raises:
        UserError: Other values are given, or keys that there are not.
    """
    faults = [fault for text in overrides for fault in _resume_fault(text, saved)]
    if faults:
        raise UserError("\n".join(faults))
    config = override(saved.tree, overrides)
    for place in differences(saved, config):
        key = next((key for key in sources(config.tree, place) if resumable(key)), place)
        raise UserError(f"{key}: {place} is made of it, which cannot change in a resumed run; leave it out")
    return config


def differences(one: Any, other: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Keys that differ between two configs, less those that may change in a resumed run, with both values."""
    if resumable(key) or one == other:
        return {}
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return {key: (one, other)}
    differing: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*one, *other]):
        differing |= differences(one.get(name), other.get(name), f"{key}.{name}" if key else str(name))
    return differing


def _resume_fault(text: str, saved: dict[str, Any]) -> Iterator[str]:
    if text.startswith("-"):
        yield f"{text}: does not go with resume, which takes the saved config as it is"
        return
    parsed = parse(quote(text))
    if parsed is None:
        yield f"{text}: is not of the form KEY=VALUE"
        return
    key = parsed.key_or_group
    if not resumable(key):
        value = short_text(None if parsed.is_delete() else text.partition("=")[2])
        before = short_text(select(saved, key.replace("/", "."), "not set"))
        yield (
            f"{key}: was {before} and cannot become {value} in a resumed run; leave it out, or "
            f"start a new run (only {', '.join(RESUMABLE)} may change)"
        )
    elif key in RESUMABLE and isinstance(parsed.value(), str):
        yield f"{text}: a group cannot be chosen anew in a resumed run; set its values, such as trainer.accelerator=cpu"


def resumable(key: str) -> bool:
    """True for a key that a resumed run may change."""
    return any(key == name or key.startswith(f"{name}.") for name in RESUMABLE)


def check_effective(before: Config, after: Config, overrides: list[str], unread: Callable[[str], bool]) -> None:
    """Refuses overrides that change nothing.

    Args:
        before: The config that was saved.
        after: The same with the overrides applied.
        overrides: KEY=VALUE, each of which could be applied.
        unread: Whether the command does not read a key.
    Raises:
        UserError: With a line for each override that changes nothing.
    """
    ends = [{key: value for key, value in walk(one) if not isinstance(value, dict)} for one in (before, after)]
    read = [place for place in dict.fromkeys([*ends[0], *ends[1]]) if not unread(place)]
    come = {place: {*sources(before.tree, place), *sources(after.tree, place)} for place in read}
    faults = []
    keys = [_key(text) for text in overrides]
    for key in keys:
        if any(key.startswith(f"{group}.") for group in keys):  # of an option that is chosen anew
            continue
        places = [place for place in read if any(f"{name}.".startswith(f"{key}.") for name in come[place])]
        if not places:
            faults.append(f"{key}: changes nothing here, for the checkpoint's own stands; leave it out")
        elif all(ends[0].get(place, ...) == ends[1].get(place, ...) for place in places):
            faults.append(f"{key}: is {short_text(select(before, key))} already and changes nothing; leave it out")
    if faults:
        raise UserError("\n".join(faults))


def _key(text: str) -> str:
    parsed = parse(quote(text))
    return parsed.key_or_group.replace("/", ".") if parsed else text


def short_text(value: Any) -> str:
    """A value in at most 60 characters."""
    if isinstance(value, dict):
        value = value.get("_target_", "a group of values")
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
