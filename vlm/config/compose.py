"""Composes configs with Hydra, from the shipped folder and the user's, to plain containers."""

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import hydra
import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from vlm.config.override import parse, path_option, quote, read, resolve_others, update
from vlm.config.signatures import arguments_of
from vlm.config.target import check_package, find, trust
from vlm.config.tree import FORMULAS, Config, MissingKey, resolve, walk
from vlm.config.untrusted import check_hydra, readable
from vlm.errors import UserError, did_you_mean, is_interrupt, nearest

WHOLE = ("experiment", "task", "debug", "hydra")  # groups whose options set keys of the whole config


def drop_leftovers(tree: DictConfig, name: str, chosen: Sequence[str], search: Sequence[str]) -> None:
    """Drops the keys that a chosen option does not know, so that an experiment can be tried with another encoder.

    Keys that both options know stay. Hydra must be initialised.

    Args:
        tree: The config with an entry `hydra`.
        name: Name of the file that the config is composed from.
        chosen: The overrides that choose options.
        search: Overrides that name folders of configs.
    """
    choices = dict(tree.hydra.runtime.choices)
    if not choices.pop("experiment", None):
        return
    same = [f"{group}={option}" for group, option in choices.items() if option and not group.startswith("hydra/")]
    plain = None
    for text in chosen:
        group, _, option = text.lstrip("+~").partition("=")
        key = group.replace("/", ".")
        node = None if group.split("/")[0] in WHOLE or "." in group or "[" in option else OmegaConf.select(tree, key)
        if option and isinstance(node, DictConfig) and "_target_" in node:
            plain = hydra.compose(name, [*search, *same]) if plain is None else plain
            _drop(node, OmegaConf.select(plain, key) or {})


def _drop(node: DictConfig, own: Any) -> None:
    """Drops keys unknown to both the config without an experiment and the node's class, and groups without a class."""
    known = arguments_of(OmegaConf.to_container(node, resolve=False))
    with open_dict(node):
        for name in [name for name in node if name not in own]:
            value = node._get_node(name)
            if name not in known or (isinstance(value, DictConfig) and "_target_" not in value):
                del node[name]


class Check(Protocol):
    """Raises a UserError if a config has a fault."""

    def __call__(self, config: Config, *, resolved: bool = True, imports: bool = True) -> None: ...


ROOT = "config"
VERSION = "1.3"  # version_base of Hydra
SHIPPED = Namespace(config_path=None, config_name=None, config_dir=None)
_HYDRAS = ("hydra.", "hydra/")
_STANDS_IN = "vlm.training.config."  # module prefix of placeholder classes, which stand for other overrides
_LISTED = (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP, ValueType.RANGE_SWEEP)

for _name, _formula in FORMULAS.items():
    OmegaConf.register_new_resolver(_name, _formula, replace=True)


class Composed(NamedTuple):
    """A composed config.

    Args:
        tree: The config with its interpolations.
        faults: A line for each override that cannot be applied; the tree lacks these.
        overrides: The applied overrides, quoted, including those that replace `model=pretrained`.
        sweeper: Settings of Hydra's sweeper, which chooses the values of a sweep's jobs.
    """

    tree: DictConfig
    faults: list[str]
    overrides: list[str]
    sweeper: Any = None

    def config(self, check: Check | None) -> Config:
        """Resolves the config and checks it; arguments and faults as in `compose`."""
        try:
            config = resolve(resolve_others(self.tree))
        except UserError as fault:
            if self.faults:  # the key may be missing because an override misspelt it
                raise UserError("\n".join(self.faults)) from fault
            if check and isinstance(fault, MissingKey):
                check(dict(OmegaConf.to_container(self.tree, resolve=False)), resolved=False)  # type: ignore[arg-type]
            raise
        try:
            if check:
                check(config, imports=not self.faults)
        except UserError as fault:
            raise UserError("\n".join([*self.faults, str(fault)])) from fault
        if self.faults:
            raise UserError("\n".join(self.faults))
        return config


def conf_dir() -> Path:
    """The folder of the configs: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def compose(overrides: list[str], check: Check | None = None, options: Namespace = SHIPPED) -> Config:
    """Composes the config with overrides.

    Args:
        overrides: KEY=VALUE, as the shell delivers them.
        check: Raises a UserError if a composed config has a fault. A config that lacks a key which another one refers
            to is passed with ``resolved=False``, since options that do not fit together may be the cause.
            One with faults of its own is passed with ``imports=False``, so that these are reported without delay.
        options: Hydra's flags that name folders of configs.
    Raises:
        UserError: With a line for each fault, which names the key that was typed.
    """
    with readable(overrides):
        return composed(options, overrides).config(check)


def override(tree: dict[str, Any], overrides: list[str], check: Check | None = None) -> Config:
    """Applies overrides to a saved config; ``data=OPTION`` replaces a group by a shipped option.

    Args:
        tree: The config with its interpolations, which follow the changed values.
        overrides: KEY=VALUE, quoted or not.
        check: As in `compose`.
    Raises:
        UserError: With a line for each that cannot be applied.
    """
    changed = OmegaConf.create(tree)
    values, faults = [], []
    for text in overrides:
        parsed = read(text)
        if parsed is None or parsed.is_sweep_override():
            faults.append(f"{text}: is not of the form KEY=VALUE with one value")
        elif not _is_option(parsed):
            values.append(parsed)
        else:
            chosen = composed(SHIPPED, [text])
            faults += chosen.faults
            key = parsed.key_or_group.replace("/", ".")
            node = OmegaConf.to_container(OmegaConf.select(chosen.tree, key), resolve=False)
            OmegaConf.update(changed, key, node, merge=False, force_add=True)
    OmegaConf.set_struct(changed, True)
    if faults := faults + update(changed, values):
        raise UserError("\n".join(faults))
    with readable(overrides):
        return Composed(changed, [], overrides).config(check)


def _is_option(override: Override) -> bool:
    """Returns True for an override that chooses an option of a group, even an unknown one.

    Raises:
        UserError: The option sets keys of the whole config.
    """
    group, option = override.key_or_group, None if override.is_delete() else override.value()
    if not isinstance(option, str):
        return False
    folder = conf_dir() / group.replace(".", "/")
    file = folder / f"{option}.yaml"
    if file.is_file() and "@package _global_" in file.read_text(encoding="utf-8"):
        raise UserError(f"{override.input_line}: changes the whole config, and cannot be chosen for one that was saved")
    return file.is_file() or (folder.is_dir() and "." not in group)


def composed(options: Namespace, overrides: list[str], sweeping: bool = False) -> Composed:
    """Composes a config with overrides; an unknown option is replaced by the nearest one, so that further faults show.

    Args:
        options: Hydra's flags that name folders of configs.
        overrides: KEY=VALUE, as the shell delivers them.
        sweeping: Whether overrides may have several values; the first of each is set.
    Raises:
        UserError: An option is unknown and none is near, or a config file sets what only a command line may.
    """
    faults: list[str] = []
    given = [override for text in overrides if (override := _readable(text, sweeping, faults))]
    search = [*_search(options), *(text for text in overrides if text.startswith("hydra.searchpath="))]
    name, chosen, values = options.config_name or ROOT, list(search), []
    with explained(options), _hydra(options) as loader:
        options_of = partial(loader.get_group_options, config_name=name, overrides=search)
        for override in given:
            singles = _singles(override) if override.is_sweep_override() else [override]
            choices = [_choice(single, options_of, faults) for single in singles]
            values += singles[:1] if choices[:1] == [None] else []
            chosen += [choice for choice in choices[:1] if choice] + [""] * ("" in choices)
        if "" in chosen:
            raise UserError("\n".join(faults))
        tree = hydra.compose(name, chosen, return_hydra_config=True)
        drop_leftovers(tree, name, chosen[len(search) :], search)
        if search or options.config_path or options.config_name:
            untyped = [*search, *(text for text in chosen if not text.lstrip("+~").startswith(_HYDRAS))]
            _check_strangers(hydra.compose(name, untyped, return_hydra_config=True))
    if target := _stand_in(tree):
        return composed(options, _expanded(target, tree, chosen, given), sweeping)
    for package in (override.value() for override in values if override.key_or_group == "trust" and override.value()):
        check_package(str(package))
        trust(str(package))
    groups = [group for group in tree.hydra.runtime.choices if not group.startswith("hydra/")]
    sweeper = OmegaConf.to_container(tree.hydra.sweeper, resolve=sweeping, enum_to_str=True)
    with open_dict(tree):
        del tree["hydra"]
    lines = [str(override.input_line) for override in given]
    return Composed(tree, faults + update(tree, values, groups), lines, sweeper)


def _stand_in(tree: DictConfig) -> str:
    """Returns the class that stands for a model described elsewhere; "" if the config describes its model."""
    node = tree.get("model")
    target = str(node.get("_target_")) if isinstance(node, DictConfig) else ""
    return target if target.startswith(_STANDS_IN) else ""


def _expanded(target: str, tree: DictConfig, chosen: list[str], given: list[Override]) -> list[str]:
    """Returns the overrides with `model=pretrained` and its keys replaced by the overrides that describe the model.

    Args:
        chosen: Overrides that choose options.
        given: All of them.
    """
    kind: Any = find(target)
    read = {"model", *(f"model.{name}" for name in kind.reads)}
    replaced = [override for override in given if override.key_or_group in read]
    if swept := [override.input_line for override in replaced if override.is_sweep_override()]:
        raise UserError(f"{swept[0]}: cannot be swept over; give one at a time")
    values = {name: OmegaConf.select(tree.model, name) for name in kind.reads}
    values |= {override.key_or_group.removeprefix("model."): override.value() for override in replaced}
    choices, said = dict(tree.hydra.runtime.choices), []
    if choices.get("experiment"):  # it makes choices of its own, and its values override the folder's
        model: Any = OmegaConf.to_container(tree.model, resolve=False)
        groups = tuple(
            f"{group.replace('/', '.')}." for group in choices if group.startswith("model/") and choices[group]
        )
        said = [
            f"{key}={json.dumps(value)}"
            for key, value in walk(model, "model")  # except those of options that are chosen separately
            if not (isinstance(value, dict) or key in read or key == "model._target_" or key.startswith(groups))
        ]
    else:
        typed = {text.lstrip("+").partition("=")[0] for text in chosen}
        choices = {group: option for group, option in choices.items() if group in typed}
    own = [str(override.input_line) for override in given if override not in replaced]
    return [*kind.overrides(values, choices), *said, *own]


def _readable(text: str, sweeping: bool, faults: list[str]) -> Override | None:
    """Reads an override; adds to `faults` and returns None if it is unreadable, or has several values and no sweep."""
    override = read(text, sweeping)
    if override is None:
        remedy = bare_word_remedy(text) or "put quotes around the value where it holds , = ( [ or {"
        faults.append(f"{text}: cannot be read as KEY=VALUE; {remedy}")
    elif override.is_sweep_override() and not sweeping:
        faults.append(f"{text}: has several values; add -m to run each, or write [...] around them for a list")
        return None
    return override


def bare_word_remedy(text: str) -> str:
    """The remedy for an argument without a key: a path, or the name of an option; "" for others."""
    options = sorted(f"{path.parent.name}={text}" for path in conf_dir().glob("*/*.yaml") if path.stem == text)
    return path_option(text) or (f"to choose this option, write {' or '.join(options)}" if options else "")


def _singles(override: Override) -> list[Override]:
    """Splits a sweep's override into one override per value."""
    if override.value_type not in _LISTED:
        return []
    key = override.get_key_element()
    return [single for value in override.sweep_string_iterator() if (single := parse(f"{key}={value}"))]


def _choice(override: Override, options_of: Callable[[str], list[str]], faults: list[str]) -> str | None:
    """Returns the override that makes Hydra choose an option, or the nearest one if it is unknown.

    Args:
        options_of: Returns the options of a group, which is slow in Hydra; not called for a dotted key with a number,
            which chooses none.
    Returns:
        None if an override chooses no option, and "" if none is near.
    """
    group, text = override.key_or_group, str(override.input_line)
    value = None if override.is_delete() else override.value()
    names = [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]
    options = options_of(group.replace(".", "/")) if names or "." not in group else []
    if "." in group and set(names) & set(options):
        choice = f"{group.replace('.', '/')}={value}"
        faults.append(f"{text}: an option is chosen with a slash; write {choice}")
        return choice
    if group.startswith(_HYDRAS) or override.package:
        return text
    if not options or "." in group or isinstance(value, dict):
        return None
    if not names and not isinstance(value, list) and not override.is_delete():
        faults.append(f"{text}: is not an option; choose from {', '.join(options)}")
        return ""
    unknown = [name for name in names if name not in options and "/" not in name and "${" not in name]
    for name in unknown:
        near = nearest(name, options)
        faults.append(f"{group}={name}: unknown; choose from {', '.join(options)}{did_you_mean(near)}")
        text = f"{text.partition('=')[0]}={near}" if near and text else ""
    return text


@contextmanager
def _hydra(options: Namespace) -> Iterator[ConfigLoader]:
    with hydra.initialize_config_dir(options.config_path or str(conf_dir()), version_base=VERSION):
        yield GlobalHydra.instance().config_loader()


def _search(options: Namespace) -> list[str]:
    folder = options.config_dir and quote(f"path=file://{Path(options.config_dir).resolve()}").removeprefix("path=")
    return [f"hydra.searchpath=[{folder}]"] if folder else []


def _check_strangers(tree: DictConfig) -> None:
    """Checks that no config file of a user trusts a package or changes how Hydra runs; only the command line may."""
    if tree.get("trust"):
        raise UserError("trust: no config file may set it; give it on the command line")
    GlobalHydra.instance().clear()
    with _hydra(SHIPPED):
        check_hydra(tree.hydra, hydra.compose(ROOT, return_hydra_config=True).hydra)


@contextmanager
def explained(options: Namespace) -> Iterator[None]:
    """Context that converts Hydra's errors about a config to a UserError with the remedy."""
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{_not_utf8(options)}: is not UTF-8; save it as UTF-8") from error
    except Exception as error:  # Hydra, OmegaConf and the YAML reader raise many types
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        raise UserError(_describe(error)) from error


def _not_utf8(options: Namespace) -> str:
    """The first config file that cannot be decoded."""
    folders = [Path(folder) for folder in (options.config_path or conf_dir(), options.config_dir) if folder]
    for path in (path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return str(path)
    return "a config file"


def _describe(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = error.__cause__ or error
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        return f"{mark.name if mark else 'YAML'}, line {mark.line + 1 if mark else '?'}: {error.problem}"
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if error.missing_cfg_file == "hydra/sweeper/optuna":
            return 'hydra/sweeper=optuna: needs a plugin of Hydra; pip install "vlm-lightning[optuna]"'
        near = did_you_mean(nearest(option, error.options))
        return f"{group}={option}: unknown; choose from {', '.join(error.options)}{near}"
    if match := re.match(r"Could not override '([^']+)'(\. No match in the defaults list)?", lines[0]):
        missing = f"is not among the defaults; write +{match[1]}=OPTION to add it"
        return f"{match[1]}: {missing if match[2] else 'unknown to Hydra'}"
    if match := re.match(r"You must specify '([^']+)'", lines[0]):
        return f"{match[1]}: no option is chosen; choose {match[1]}= one of {', '.join(lines[2:])}"
    if isinstance(cause, OmegaConfBaseException):
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        key = f"{cause.full_key}: " if cause.full_key else ""
        return f"{key}{reason}" if cause is error or not str(error) else f"{lines[0]}: {reason}"
    plain = isinstance(error, HydraException | ValueError | OSError)
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if plain else f"{type(error).__name__}: {text}"
