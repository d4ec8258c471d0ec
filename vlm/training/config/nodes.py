"""A run's config: its nodes as they are built, and the overrides of a saved one."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from vlm.config.build import takes_argument
from vlm.config.compose import conf_dir, override
from vlm.config.override import parse, read
from vlm.config.target import SignatureLookup, signature
from vlm.config.tree import Config, Tree, Value, select, sources
from vlm.errors import UserError

DATA = "vlm.training.data_module.Data"
MAX_OPTIONS = 3  # options of a group that a message names
# Options for a user's own files, which a message names before those of published and generated data.
OWN_DATA: tuple[str, ...] = ("captions", "image_folder", "image_table", "questions", "conversations", "text", "texts")
OWN_DATA += ("text_folder", "translations", "aligned", "squad", "conll")
# Groups under `model` that exist to be interpolated; the model's class does not take them.
REFERENCE_KEYS = ("size", "position", "projector", "fusion", "adapt")
TEST_KEYS = ("task.beam", "task.length_penalty")  # only tests use beam search
RESUMABLE = (
    *("trainer", "logger", "callbacks", "data.num_workers", "compile", "activation_checkpointing", "schedule_steps"),
    *TEST_KEYS,
)


def data_node(config: Config, look_up: SignatureLookup = signature) -> Tree:
    """Returns the node of the data module, with only the keys under `data` that its class takes."""
    signature_of_data = look_up(DATA)
    values = {
        name: value
        for name, value in config["data"].items()
        if signature_of_data is None or name in signature_of_data.arguments
    }
    return {"_target_": DATA, **values}


def model_node(config: Config) -> Tree:
    """Returns the model's node, without the keys in REFERENCE_KEYS and without `init_from` at any depth."""
    node = {name: value for name, value in config["model"].items() if name not in REFERENCE_KEYS}
    return cast(Tree, _without_init_from(node))


def _without_init_from(value: Value) -> Value:
    if isinstance(value, dict):
        return {name: _without_init_from(child) for name, child in value.items() if name != "init_from"}
    return value


def inject(value: Any, injected: Mapping[str, Any]) -> Any:
    """Adds values to a node, and to all nodes below it, whose class takes arguments of these names."""
    if isinstance(value, list):
        return [inject(child, injected) for child in value]
    if not isinstance(value, dict):
        return value
    filled = {key: inject(child, injected) for key, child in value.items()}
    return filled | (
        {name: injected[name] for name in injected if takes_argument(value, name)} if "_target_" in value else {}
    )


def check_fit(config: Config, source: type | None = None, look_up: SignatureLookup = signature) -> None:
    """Checks that the records of a source hold every value that the task reads.

    Args:
        source: Source to check instead of the config's.
        look_up: Returns the signatures of the source and the fields; unknown ones are not checked.
    Raises:
        UserError: They lack a value; the message names the source and the task.
    """
    targets = [config["data"]["source"]["_target_"], *_field_targets(config["task"])]
    own, *fields = (_read_kind(target, look_up) for target in targets)
    own = source or own
    holds, needs = getattr(own, "holds", None), _needs(fields)
    if holds is None or needs is None:
        return
    if lacking := sorted(needs - set(holds)):
        raise UserError(
            f"data: records of {own.__name__} hold {' and '.join(holds)}, while task={config['task_name']} "
            f"reads {' and '.join(lacking)}; choose {_fitting_options(fields, own, look_up)}"
        )


def _read_kind(target: str, look_up: SignatureLookup) -> Any:
    """Returns the class of a target; None if its signature is unknown."""
    known = look_up(target)
    return None if known is None else known.kind


def _field_targets(task: Mapping[str, Any]) -> list[str]:
    return [node["_target_"] for node in task["fields"].values()]


def _needs(fields: Sequence[Any]) -> set[str] | None:
    """Returns the values that fields read; None if that of one is unknown."""
    needs: list[Any] = [getattr(field, "needs", None) for field in fields]
    return None if None in needs else {name for names in needs for name in names}


def _fitting_options(fields: Sequence[Any], source: Any, look_up: SignatureLookup) -> str:
    """Names the options of data that hold what a task's fields read, and the tasks that a source fits."""

    def fits(needed: Sequence[Any], kind: Any) -> bool:
        refuses_turns = getattr(kind, "has_turns", False) and any(
            getattr(field, "turns", True) is False for field in needed
        )
        needs = _needs(needed)
        return needs is not None and needs <= set(getattr(kind, "holds", ())) and not refuses_turns

    sources = {name: node["source"]["_target_"] for name, node in _shipped_options("data")}
    data = [name for name, target in sources.items() if fits(fields, _read_kind(target, look_up))]
    data.sort(key=lambda name: OWN_DATA.index(name) if name in OWN_DATA else len(OWN_DATA))
    tasks = [
        name
        for name, node in _shipped_options("task")
        if fits([_read_kind(target, look_up) for target in _field_targets(node["task"])], source)
    ]
    groups = {"data": data, "task": tasks}
    chosen = [
        " or ".join(f"{group}={name}" for name in names[:MAX_OPTIONS]) for group, names in groups.items() if names
    ]
    return ", or ".join(chosen) or "another data set or task"


def _shipped_options(group: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each option of a group and its keys; of inherited ones, only a source and a task's fields."""

    def read(path: Path) -> dict[str, Any]:
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
        for name in (name for name in node.get("defaults", []) if isinstance(name, str) and name != "_self_"):
            base = read(path.parent / f"{name.removesuffix('@_here_')}.yaml")
            node["source"] = {**base.get("source", {}), **node.get("source", {})}
            if "task" in base:
                fields = {**base["task"]["fields"], **node.get("task", {}).get("fields", {})}
                node["task"] = {**base["task"], **node.get("task", {}), "fields": fields}
        return node

    return ((path.stem, read(path)) for path in sorted((conf_dir() / group).glob("*.yaml")))


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
