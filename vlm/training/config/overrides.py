"""Overrides of saved configs, for resumed runs and evaluations."""

import os
from collections.abc import Callable, Iterator, Sequence

from vlm.config.compose import override
from vlm.config.override import parse, read
from vlm.config.tree import Config, Value, select, sources
from vlm.errors import UserError

TEST_KEYS = ("task.beam", "task.length_penalty")  # only tests use beam search
RESUMABLE = (
    *("trainer", "logger", "callbacks", "data.num_workers", "compile", "activation_checkpointing", "schedule_steps"),
    *TEST_KEYS,
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
    """Returns the config of a resumed run: the saved config with these overrides.

    Raises:
        UserError: An override changes a value that must stay, or names an unknown key.
    """
    faults = [fault for text in overrides for fault in _find_resume_faults(text, saved)]
    if faults:
        raise UserError("\n".join(faults))
    config = override(saved.tree, overrides)
    for place in differences(saved, config):
        key = next((key for key in sources(config.tree, place) if _is_within(key, RESUMABLE)), place)
        raise UserError(f"{key}: {place} depends on it and cannot change in a resumed run; leave it out")
    return config


def differences(
    config: Value, changed: Value, key: str = "", ignored: Sequence[str] = RESUMABLE
) -> dict[str, tuple[Value, Value]]:
    """Returns the keys that differ between two configs, with both values; keys in `ignored` are skipped."""
    if config == changed or _is_within(key, ignored):
        return {}
    if not (isinstance(config, dict) and isinstance(changed, dict)):
        return {key: (config, changed)}
    differing: dict[str, tuple[Value, Value]] = {}
    for name in dict.fromkeys([*config, *changed]):
        path = f"{key}.{name}" if key else str(name)
        differing |= differences(config.get(name), changed.get(name), path, ignored)
    return differing


def _find_resume_faults(text: str, saved: Config) -> Iterator[str]:
    if text.startswith("-"):
        yield f"{text}: cannot be combined with resume, which uses the saved config"
        return
    parsed = read(text)
    if parsed is None:
        yield f"{text}: is not of the form KEY=VALUE"
        return
    key = parsed.key_or_group
    if not _is_within(key, RESUMABLE):
        before = select(saved, key.replace("/", "."), "not set")
        if not parsed.is_delete() and parsed.value() == before:
            return
        value = short_text(None if parsed.is_delete() else text.partition("=")[2])
        yield (
            f"{key}: was {short_text(before)} and cannot become {value} in a resumed run; leave it out, or "
            f"start a new run (only {', '.join(RESUMABLE)} may change)"
        )
    elif key in RESUMABLE and isinstance(parsed.value(), str):
        remedy = "set its values, such as trainer.accelerator=cpu"
        yield f"{text}: a resumed run cannot choose another option of a group; {remedy}"


def _is_within(key: str, names: Sequence[str]) -> bool:
    """Returns True for a key that is one of these names, or below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def check_effective(saved: Config, overrides: list[str], is_ignored: Callable[[str], bool]) -> None:
    """Checks that every override has an effect.

    Args:
        saved: The config that was saved.
        overrides: KEY=VALUE; together they can be applied.
        is_ignored: Returns True for a key that the command does not read.
    Raises:
        UserError: With a line for each override without an effect.
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
        if all(is_ignored(place) for place in differences(saved, changed, ignored=())):
            same = select(saved, key) == select(changed, key)
            already = f"is {short_text(select(saved, key))} already"
            reason = already if same else "has no effect, because the checkpoint's value is used"
            faults.append(f"{key}: {reason}; leave it out")
    if faults:
        raise UserError("\n".join(faults))


def short_text(value: Value) -> str:
    """Formats a value in at most 60 characters."""
    if isinstance(value, dict):
        value = value.get("_target_", "a group of values")
    text = str(value) or "''"
    return text if len(text) <= 60 else f"{text[:57]}..."
