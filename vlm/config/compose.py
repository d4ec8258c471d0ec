"""Composes configs with Hydra, from the config folders of vlm and of the user, to plain containers."""

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from vlm.config.build import arguments_of
from vlm.config.override import parse, quote, read, resolve_custom_interpolations, to_tree, update
from vlm.config.target import check_package, find, trust
from vlm.config.tree import FORMULAS, Config, MissingKey, Tree, resolve, select, walk
from vlm.config.untrusted import allow_environment, find_differences
from vlm.errors import UserError, did_you_mean, find_similar

GLOBAL_GROUPS = ("experiment", "task", "debug", "hydra")  # groups whose options set keys anywhere in the config


def compose_without_experiment(tree: DictConfig, name: str, search: Sequence[str]) -> DictConfig | None:
    """Composes the options that a config chooses without its experiment; None if it has none.

    Hydra must be initialized.

    Args:
        tree: The config, including its node `hydra`.
        name: Name of the primary config.
        search: Overrides that set the search path.
    """
    choices = dict(tree.hydra.runtime.choices)
    if not choices.pop("experiment", None):
        return None
    same_choices = [
        f"{group}={option}" for group, option in choices.items() if option and not group.startswith("hydra/")
    ]
    return hydra.compose(name, [*search, *same_choices])


def drop_leftovers(tree: DictConfig, plain: DictConfig, chosen: Sequence[str]) -> None:
    """Drops keys of an experiment that an explicitly chosen option does not have, such as another encoder.

    These are keys that neither the config without the experiment nor the option's class has, and groups without a
    class.

    Args:
        tree: The config.
        plain: The config without its experiment.
        chosen: Overrides that choose options of groups other than GLOBAL_GROUPS.
    """
    for text in chosen:
        group, _, option = text.lstrip("+~").partition("=")
        if not option or "." in group or "[" in option:
            continue
        node = OmegaConf.select(tree, key := group.replace("/", "."))
        if not isinstance(node, DictConfig) or "_target_" not in node:
            continue
        known, arguments = OmegaConf.select(plain, key) or {}, arguments_of(to_tree(node))
        with open_dict(node):
            for name in [name for name in node if name not in known]:
                value = node._get_node(name)
                if name not in arguments or (isinstance(value, DictConfig) and "_target_" not in value):
                    del node[name]


class Check(Protocol):
    """A function that raises a UserError if a config has faults."""

    def __call__(self, config: Config, *, resolved: bool = True, imports: bool = True) -> None: ...


ROOT = "config"
VERSION = "1.3"  # version_base of Hydra
DEFAULT_OPTIONS = Namespace(config_path=None, config_name=None, config_dir=None)
_HYDRA_PREFIXES = ("hydra.", "hydra/")
_PLACEHOLDER_PREFIX = "vlm.training.config."  # of classes such as PretrainedModel, replaced by further overrides
_ENUMERABLE = (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP, ValueType.RANGE_SWEEP)

for _name, _formula in FORMULAS.items():
    OmegaConf.register_new_resolver(_name, _formula, replace=True)


class Composition(NamedTuple):
    """A composed config.

    Args:
        tree: The config with its interpolations.
        faults: A line per override that could not be applied.
        overrides: The applied overrides, quoted, including those that replace `model=pretrained`.
        sweeper: Settings of Hydra's sweeper.
    """

    tree: DictConfig
    faults: list[str]
    overrides: list[str]
    sweeper: Any = None

    def config(self, check: Check | None) -> Config:
        """Resolves the config and checks it; arguments and faults as in `compose`."""
        try:
            config = resolve(resolve_custom_interpolations(self.tree))
        except UserError as fault:
            if self.faults:  # the key may be missing because of a misspelt override
                raise UserError("\n".join(self.faults)) from fault
            if check and isinstance(fault, MissingKey):
                check(Config(to_tree(self.tree)), resolved=False)
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
    """Returns the config folder: inside the package of an installed wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def compose(overrides: list[str], check: Check | None = None, options: Namespace = DEFAULT_OPTIONS) -> Config:
    """Composes the config with overrides.

    Args:
        overrides: KEY=VALUE arguments of a command line.
        check: Raises a UserError if the config has faults. It is called with ``resolved=False`` if an interpolation
            refers to a missing key, because incompatible options may be the cause, and with ``imports=False`` if an
            override could not be applied, to report that without delay.
        options: Hydra's flags that name config folders.
    Raises:
        UserError: With a line per fault, which names the key that the user set.
    """
    with allow_environment(overrides):
        return compose_tree(options, overrides).config(check)


def override(tree: Tree, overrides: list[str], check: Check | None = None) -> Config:
    """Applies overrides to a saved config. ``data=OPTION`` replaces a group with an option of vlm.

    Args:
        tree: The config with its interpolations, which are resolved afterwards.
        overrides: KEY=VALUE, quoted or not.
        check: As in `compose`.
    Raises:
        UserError: With a line for each override that cannot be applied.
    """
    changed = OmegaConf.create(tree)
    values, faults = [], []
    for text in overrides:
        parsed = read(text)
        if parsed is None or parsed.is_sweep_override():
            faults.append(f"{text}: is not of the form KEY=VALUE with one value")
        elif not _chooses_option(parsed):
            values.append(parsed)
        else:
            chosen = compose_tree(DEFAULT_OPTIONS, [text])
            faults += chosen.faults
            key = parsed.key_or_group.replace("/", ".")
            node = to_tree(OmegaConf.select(chosen.tree, key))
            OmegaConf.update(changed, key, node, merge=False, force_add=True)
    OmegaConf.set_struct(changed, True)
    if faults := faults + update(changed, values):
        raise UserError("\n".join(faults))
    with allow_environment(overrides):
        return Composition(changed, [], overrides).config(check)


def _chooses_option(override: Override) -> bool:
    """Returns True if an override chooses an option of a group, even an unknown option.

    Raises:
        UserError: The option sets keys anywhere in the config.
    """
    group, option = override.key_or_group, None if override.is_delete() else override.value()
    if not isinstance(option, str):
        return False
    folder = conf_dir() / group.replace(".", "/")
    file = folder / f"{option}.yaml"
    if file.is_file() and "@package _global_" in file.read_text(encoding="utf-8"):
        raise UserError(f"{override.input_line}: sets keys of several groups and cannot be applied to a saved config")
    return file.is_file() or (folder.is_dir() and "." not in group)


def compose_tree(options: Namespace, overrides: list[str], sweeping: bool = False) -> Composition:
    """Composes a config. Replaces an unknown option with the most similar one, so that further faults are found.

    Args:
        options: Hydra's flags that name config folders.
        overrides: KEY=VALUE arguments of a command line.
        sweeping: Whether overrides may have several values, of which the first is set.
    Raises:
        UserError: An option is unknown and none is similar, or a config file sets a key that only the command line may
            set.
    """
    faults: list[str] = []
    given = [override for text in overrides if (override := _read_override(text, sweeping, faults))]
    folder = options.config_dir and quote(f"path=file://{Path(options.config_dir).resolve()}").removeprefix("path=")
    search = [f"hydra.searchpath=[{folder}]"] if folder else []
    search += [text for text in overrides if text.startswith("hydra.searchpath=")]
    name, chosen, values = options.config_name or ROOT, list(search), []
    with explain_hydra_errors(options), _initialize_hydra(options) as loader:
        options_of = partial(loader.get_group_options, config_name=name, overrides=search)
        for override in given:
            singles, key = [override], override.get_key_element()
            if override.is_sweep_override():
                values_of_key = override.sweep_string_iterator() if override.value_type in _ENUMERABLE else ()
                singles = [single for value in values_of_key if (single := parse(f"{key}={value}"))]
            choices = [_choose_option(single, options_of, faults) for single in singles]
            values += singles[:1] if choices[:1] == [None] else []
            chosen += [choice for choice in choices[:1] if choice] + [""] * ("" in choices)
        if "" in chosen:
            raise UserError("\n".join(faults))
        tree = hydra.compose(name, chosen, return_hydra_config=True)
        model = tree.get("model")
        typed = [text for text in chosen[len(search) :] if re.split("[/=@]", text.lstrip("+~"))[0] not in GLOBAL_GROUPS]
        target = str(model.get("_target_")) if isinstance(model, DictConfig) else ""
        is_placeholder = target.startswith(_PLACEHOLDER_PREFIX)
        plain = compose_without_experiment(tree, name, search) if typed or is_placeholder else None
        if plain is not None:
            drop_leftovers(tree, plain, typed)
        if search or options.config_path or options.config_name:
            untyped = [*search, *(text for text in chosen if not text.lstrip("+~").startswith(_HYDRA_PREFIXES))]
            _check_user_configs(hydra.compose(name, untyped, return_hydra_config=True))
    if is_placeholder:
        derived, remaining = _expand_placeholder(target, tree, plain, chosen, given)
        result = compose_tree(options, [*derived, *remaining], sweeping)
        keys = {text.partition("=")[0] for text in derived}
        keys -= {override.key_or_group for override in given} | {text.partition("=")[0] for text in remaining}
        explained = _explain_derived_faults(result.faults, keys, tree.hydra.runtime.choices)
        return result._replace(faults=list(dict.fromkeys([*faults, *explained])))
    for package in (override.value() for override in values if override.key_or_group == "trust" and override.value()):
        check_package(str(package))
        trust(str(package))
    groups = [group for group in tree.hydra.runtime.choices if not group.startswith("hydra/")]
    sweeper = OmegaConf.to_container(tree.hydra.sweeper, resolve=sweeping, enum_to_str=True)
    with open_dict(tree):
        del tree["hydra"]
    lines = [str(override.input_line) for override in given]
    return Composition(tree, faults + update(tree, values, groups), lines, sweeper)


def _expand_placeholder(
    target: str, tree: DictConfig, plain: DictConfig | None, chosen: list[str], given: list[Override]
) -> tuple[list[str], list[str]]:
    """Replaces `model=pretrained` and its keys by the overrides that describe the model.

    Returns them, and those that the experiment and the user set, which are applied after them.

    Args:
        target: The placeholder's class.
        tree: The config.
        plain: The config without its experiment; None if it has none.
        chosen: The overrides that choose options.
        given: All overrides.
    """
    placeholder: Any = find(target)
    keys = {"model", *(f"model.{name}" for name in placeholder.reads)}
    replaced = [override for override in given if override.key_or_group in keys]
    if swept := [override.input_line for override in replaced if override.is_sweep_override()]:
        raise UserError(f"{swept[0]}: a sweep cannot vary this key; start a run per value")
    values = {name: OmegaConf.select(tree.model, name) for name in placeholder.reads}
    values |= {override.key_or_group.removeprefix("model."): override.value() for override in replaced}
    choices, from_experiment = dict(tree.hydra.runtime.choices), []
    typed = {text.lstrip("+").partition("=")[0] for text in chosen}
    if plain is None:
        choices = {group: option for group, option in choices.items() if group in typed}
    else:  # the experiment's choices and values have precedence over those of the folder
        model: Tree = {"model": to_tree(tree.model)}
        without: Tree = {"model": to_tree(plain.model)}
        groups = tuple(f"{group.replace('/', '.')}." for group in typed if group.startswith("model/"))
        from_experiment = [
            f"{key}={json.dumps(value)}"
            for key, value in walk(model)  # except values for options that the user replaced
            if not (isinstance(value, dict) or key in keys or key.startswith(groups)) and select(without, key) != value
        ]
    unchanged = [str(override.input_line) for override in given if override not in replaced]
    return placeholder.overrides(values, choices), [*from_experiment, *unchanged]


def _explain_derived_faults(faults: list[str], keys: set[str], choices: Mapping[str, str]) -> list[str]:
    """Replaces faults of keys that `model=pretrained` sets, which the user did not write, by one for the group.

    Args:
        faults: A line per override that could not be applied.
        keys: Keys that only `model=pretrained` sets.
        choices: The chosen option of each group.
    """
    derived = [key for fault in faults if (key := fault.partition(":")[0]) in keys]
    explained = list(dict.fromkeys(fault for fault in faults if fault.partition(":")[0] not in derived))
    for group in dict.fromkeys(key.partition(".")[0] for key in derived):
        names = " and ".join(dict.fromkeys(key.partition(".")[2] for key in derived if key.startswith(f"{group}.")))
        lacks = f"{group}={choices.get(group)}: has no {names}, which model={choices['model']} sets"
        explained.append(f"{lacks}; choose another option of {group}, or another model")
    return explained


def _read_override(text: str, sweeping: bool, faults: list[str]) -> Override | None:
    """Parses an override and adds its faults. Returns None if it is invalid or has several values without a sweep."""
    override = read(text, sweeping)
    if override is None:
        remedy = bare_word_remedy(text) or "quote the value if it contains , = ( [ or {"
        faults.append(f"{text}: cannot be read as KEY=VALUE; {remedy}")
    elif override.is_sweep_override() and not sweeping:
        faults.append(f"{text}: has several values; add -m to run each of them, or write [...] for a list")
        return None
    return override


def bare_word_remedy(text: str) -> str:
    """Returns the remedy for an argument without a key that is a path or the name of an option; else ""."""
    if Path(text).is_file():
        return f"for captions in this file, give data=captions data.path={text}; `vlm train --help` lists other data"
    if Path(text).is_dir():
        return f"for photos in this folder, give data=captions data.root={text}"
    options = sorted(f"{path.parent.name}={text}" for path in conf_dir().glob("*/*.yaml") if path.stem == text)
    return f"to choose this option, write {' or '.join(options)}" if options else ""


def _choose_option(override: Override, options_of: Callable[[str], list[str]], faults: list[str]) -> str | None:
    """Returns the override with which Hydra chooses an option, or the most similar option if it is unknown.

    Args:
        options_of: Returns the options of a group. It is slow, so it is not called for dotted keys with numbers, which
            choose no option.
    Returns:
        None if the override does not choose an option; "" if the option is unknown and none is similar.
    """
    group, text = override.key_or_group, str(override.input_line)
    value = None if override.is_delete() else override.value()
    chosen = value if isinstance(value, list) else [value]
    names = [name for name in chosen if isinstance(name, str)]
    options = options_of(group.replace(".", "/")) if names or "." not in group else []
    if "." in group and set(names) & set(options):
        choice = f"{group.replace('.', '/')}={value}"
        faults.append(f"{text}: the group of an option has slashes; write {choice}")
        return choice
    if group.startswith(_HYDRA_PREFIXES) or override.package:
        return text
    if not options or "." in group or isinstance(value, dict):
        return None
    if len(names) < len(chosen) and not override.is_delete():
        faults.append(f"{text}: is not an option; choose from {', '.join(options)}")
        return ""
    unknown = [name for name in names if name not in options and "/" not in name and "${" not in name]
    for name in unknown:
        similar = find_similar(name, options)
        faults.append(f"{group}={name}: unknown; choose from {', '.join(options)}{did_you_mean(similar)}")
        text = f"{text.partition('=')[0]}={similar}" if similar and text else ""
    return text


@contextmanager
def _initialize_hydra(options: Namespace) -> Iterator[ConfigLoader]:
    """Context in which Hydra composes configs; yields its loader."""
    with hydra.initialize_config_dir(options.config_path or str(conf_dir()), version_base=VERSION):
        yield GlobalHydra.instance().config_loader()


def _check_user_configs(tree: DictConfig) -> None:
    """Checks that config files do not trust packages or change how Hydra runs, which only the command line may do."""
    if tree.get("trust"):
        raise UserError("trust: config files must not set it; set it on the command line")
    GlobalHydra.instance().clear()
    with _initialize_hydra(DEFAULT_OPTIONS):
        shipped = hydra.compose(ROOT, return_hydra_config=True)
    expected, actual = (to_tree(config.hydra) for config in (shipped, tree))
    if differing := list(find_differences(actual, expected, "hydra")):
        fault = "changes how Hydra runs, which config files must not do; set it on the command line"
        raise UserError("\n".join(f"{key}: {fault}" for key in differing[:5]))


@contextmanager
def explain_hydra_errors(options: Namespace) -> Iterator[None]:
    """Context that converts Hydra's errors to a UserError with a remedy."""
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{_find_undecodable_file(options)}: is not UTF-8; save it as UTF-8") from error
    except Exception as error:  # Hydra, OmegaConf and the YAML reader raise many types
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__ or cause.__context__  # OmegaConf suppresses causes
        if cause is not None:
            raise KeyboardInterrupt from error
        raise UserError(_describe_hydra_error(error)) from error


def _find_undecodable_file(options: Namespace) -> str:
    """Returns the first config file that is not UTF-8."""
    folders = [Path(folder) for folder in (options.config_path or conf_dir(), options.config_dir) if folder]
    for path in (path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return str(path)
    return "a config file"


def _describe_hydra_error(error: Exception) -> str:
    """Returns an error of Hydra, OmegaConf or YAML as a line that names the key or the file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = error.__cause__ or error
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        return f"{mark.name if mark else 'YAML'}, line {mark.line + 1 if mark else '?'}: {error.problem}"
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if error.missing_cfg_file == "hydra/sweeper/optuna":
            return 'hydra/sweeper=optuna: needs a plugin of Hydra; pip install "vlm-lightning[optuna]"'
        similar = did_you_mean(find_similar(option, error.options))
        return f"{group}={option}: unknown; choose from {', '.join(error.options)}{similar}"
    if match := re.match(r"Could not override '([^']+)'(\. No match in the defaults list)?", lines[0]):
        missing = f"is not in the defaults list; write +{match[1]}=OPTION to add it"
        return f"{match[1]}: {missing if match[2] else 'unknown to Hydra'}"
    if match := re.match(r"You must specify '([^']+)'", lines[0]):
        return f"{match[1]}: no option is chosen; set {match[1]} to one of {', '.join(lines[2:])}"
    if isinstance(cause, OmegaConfBaseException):
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        key = f"{cause.full_key}: " if cause.full_key else ""
        return f"{key}{reason}" if cause is error or not str(error) else f"{lines[0]}: {reason}"
    plain = isinstance(error, HydraException | ValueError | OSError)
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if plain else f"{type(error).__name__}: {text}"
