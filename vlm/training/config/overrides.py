"""Overrides that a run, its resumption and its evaluation accept beyond those of a new config."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vlm.config.links import has, select
from vlm.config.override import apply, parse, quote
from vlm.errors import UserError

RESUMABLE = ("trainer", "logger", "callbacks", "data.num_workers", "compile", "activation_checkpointing")


def split_option(argv: list[str], name: str = "resume") -> tuple[str | None, list[str]]:
    """Takes ``NAME=VALUE`` out of a command line, of an option that is no value of the config.

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


def check_resume_overrides(overrides: list[str], saved_config: dict[str, Any]) -> dict[str, Any]:
    """The config that a resumed run goes on with: the saved one, with the values that may change.

    Raises:
        UserError: Other values are given, or keys that there are not.
    """
    faults = [fault for text in overrides for fault in _resume_fault(text, saved_config)]
    if faults:
        raise UserError("\n".join(faults))
    config, taken = apply(saved_config, overrides)
    fixed = [(key, place) for key, places in taken.items() for place in places if not resumable(place)]
    for key, place in fixed:
        if select(config, place) != select(saved_config, place):
            raise UserError(f"{key}: {place} is made of it, which cannot change in a resumed run; leave it out")
    return config


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
            faults.append(f"{key}: is {short_text(select(before, key))} already and changes nothing; leave it out")
    if faults:
        raise UserError("\n".join(faults))


def short_text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("_target_", "a group of values")
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
