"""Overrides of saved configs: for a resumed run and for an evaluation."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vlm.config.compose import override
from vlm.config.override import parse, read
from vlm.config.tree import Config, select, sources
from vlm.errors import UserError

TESTED = ("task.beam", "task.length_penalty")  # only tests use them: validations are greedy
RESUMABLE = (
    *("trainer", "logger", "callbacks", "data.num_workers", "compile", "activation_checkpointing", "schedule_steps"),
    *TESTED,
)


def split_option(argv: list[str], name: str) -> tuple[str | None, list[str]]:
    """Removes ``NAME=VALUE`` from a command line; returns the value, None if there is none, and the other arguments.

    Raises:
        UserError: It is given more than once.
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
    """The config of a resumed run: the saved one with these overrides.

    Raises:
        UserError: An override changes a value that must stay, or names an unknown key.
    """
    faults = [fault for text in overrides for fault in _resume_fault(text, saved)]
    if faults:
        raise UserError("\n".join(faults))
    config = override(saved.tree, overrides)
    for place in differences(saved, config):
        key = next((key for key in sources(config.tree, place) if _below(key, RESUMABLE)), place)
        raise UserError(f"{key}: {place} is made of it, which cannot change in a resumed run; leave it out")
    return config


def differences(one: Any, other: Any, key: str = "", keep: Sequence[str] = RESUMABLE) -> dict[str, tuple[Any, Any]]:
    """Keys that differ between two configs, with both values; those in `keep` are left out."""
    if one == other or _below(key, keep):
        return {}
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return {key: (one, other)}
    differing: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*one, *other]):
        differing |= differences(one.get(name), other.get(name), f"{key}.{name}" if key else str(name), keep)
    return differing


def _resume_fault(text: str, saved: dict[str, Any]) -> Iterator[str]:
    if text.startswith("-"):
        yield f"{text}: does not go with resume, which takes the saved config as it is"
        return
    parsed = read(text)
    if parsed is None:
        yield f"{text}: is not of the form KEY=VALUE"
        return
    key = parsed.key_or_group
    if not _below(key, RESUMABLE):
        before = select(saved, key.replace("/", "."), "not set")
        if not parsed.is_delete() and parsed.value() == before:
            return
        value = short_text(None if parsed.is_delete() else text.partition("=")[2])
        yield (
            f"{key}: was {short_text(before)} and cannot become {value} in a resumed run; leave it out, or "
            f"start a new run (only {', '.join(RESUMABLE)} may change)"
        )
    elif key in RESUMABLE and isinstance(parsed.value(), str):
        yield f"{text}: a group cannot be chosen anew in a resumed run; set its values, such as trainer.accelerator=cpu"


def _below(key: str, names: Sequence[str]) -> bool:
    """Returns True for a key that is one of these names, or below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def check_effective(saved: Config, overrides: list[str], is_ignored: Callable[[str], bool]) -> None:
    """Refuses overrides that change nothing.

    Args:
        saved: The config that was saved.
        overrides: KEY=VALUE; together they can be applied.
        is_ignored: Returns True for a key that the command does not read.
    Raises:
        UserError: With a line for each override that changes nothing.
    """
    keys = {text: parsed.key_or_group.replace("/", ".") for text in overrides if (parsed := read(text))}
    faults = []
    for text, key in keys.items():
        if any(key.startswith(f"{group}.") for group in keys.values()):  # its group is chosen by another override
            continue
        try:
            changed = override(saved.tree, [text])
        except UserError:  # it depends on another override
            continue
        if all(is_ignored(place) for place in differences(saved, changed, keep=())):
            same = select(saved, key) == select(changed, key)
            already = f"is {short_text(select(saved, key))} already and changes nothing"
            reason = already if same else "changes nothing here, for the checkpoint's own stands"
            faults.append(f"{key}: {reason}; leave it out")
    if faults:
        raise UserError("\n".join(faults))


def short_text(value: Any) -> str:
    """A value in at most 60 characters."""
    if isinstance(value, dict):
        value = value.get("_target_", "a group of values")
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
