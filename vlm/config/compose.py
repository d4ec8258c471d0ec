"""Composition of configs by Hydra, from the shipped folder and those of a user, to plain containers."""

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from vlm.config.faults import Check, checked, explain, group_names, not_utf8, option_faults
from vlm.config.links import FORMULAS
from vlm.config.override import apply, check_effective, parse, quote
from vlm.config.untrusted import check_hydra, readable
from vlm.errors import UserError

ROOT = "config"
VERSION = "1.3"  # of Hydra's behaviour
SHIPPED = Namespace(config_path=None, config_name=None, config_dir=None)
# Keys that stand in a group only for the nodes below it to refer to.
_REFERRED = {
    "data": {"root", "path", "val_path", "test_path", "image_size"},
    "model": {"size", "position", "init_from"},
}

_ANYWHERE = {"init_from"}  # of any part

for _name, _formula in FORMULAS.items():
    OmegaConf.register_new_resolver(_name, _formula, replace=True)


def conf_dir() -> Path:
    """The folder of the configs: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def node(config: dict[str, Any], group: str) -> dict[str, Any]:
    """The node of a group that is to be built: without the keys that others only refer to."""
    referred = _REFERRED.get(group, set())
    return {name: _without(value, _ANYWHERE) for name, value in config[group].items() if name not in referred}


def _without(value: Any, names: Collection[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(child, names) for name, child in value.items() if name not in names}
    return value


def values_of(node: dict[str, Any], name: str, path: str = "") -> dict[str, Any]:
    """The values of a key at and below a node that are set, by the path of the node that has it."""
    found = {path: node[name]} if node.get(name) is not None else {}
    for key, child in node.items():
        if isinstance(child, dict):
            found |= values_of(child, name, f"{path}.{key}" if path else key)
    return found


def compose(
    overrides: list[str],
    check: Check | None = None,
    suit: Check | None = None,
    options: Namespace = SHIPPED,
) -> dict[str, Any]:
    """Composes the config with overrides, resolved to plain containers.

    Args:
        overrides: KEY=VALUE, as the shell delivers them.
        check: Raises a UserError for a composed config that is at fault. Where composing finds faults, it is asked for
            the others, so that all are reported at once.
        suit: Raises a UserError where the chosen options do not suit one another, which may be why a key that one
            refers to is not there; its config is not resolved.
        options: Hydra's flags that name folders of configs.
    Raises:
        UserError: With a line for each fault, which names the key that was typed.
    """
    quoted = [quote(text) for text in overrides]
    with explained(options, quoted, check):
        check_strangers(options, quoted)
        return checked(composed(options, quoted), check, suit)


def override(
    config: dict[str, Any], overrides: list[str], *, unread: Callable[[str], bool] | None = None
) -> dict[str, Any]:
    """Applies overrides to a config that was saved; ``data=OPTION`` puts a shipped option in the place of a group.

    Args:
        unread: Whether the command does not read a key; with it, overrides that change nothing are refused.
    Raises:
        UserError: With a line for each that cannot be applied, or changes nothing.
    """
    quoted = [quote(text) for text in overrides]
    values, chosen = [], {}
    with explained(SHIPPED, quoted):
        for text in quoted:
            parsed = parse(text)
            option = parsed.value() if parsed else None
            file = conf_dir() / str(parsed and parsed.key_or_group) / f"{option}.yaml"
            if parsed is None or not isinstance(option, str) or not file.is_file():
                values.append(text)
                continue
            key = parsed.key_or_group.replace("/", ".")
            if "@package _global_" in file.read_text(encoding="utf-8"):
                raise UserError(f"{text}: changes the whole config, and cannot be chosen for one that was saved")
            group = OmegaConf.select(composed(SHIPPED, [text]), key)
            chosen[key] = OmegaConf.to_container(group, resolve=False)
        applied, taken = apply(config, values, chosen)
    if unread is not None:
        referred = {f"{group}.{name}" for group, names in _REFERRED.items() for name in names}
        taken |= {key: [] for key in chosen}
        check_effective(config, applied, taken, lambda key: key in referred or unread(key))
    return applied


def composed(options: Namespace, overrides: list[str], **how: bool) -> DictConfig:
    """Hydra's composition, interpolations not resolved."""
    search = []
    if options.config_dir:
        folder = quote(f"path=file://{Path(options.config_dir).resolve()}").removeprefix("path=")
        search = [f"hydra.searchpath=[{folder}]"]
    root = options.config_path or str(conf_dir())
    with hydra.initialize_config_dir(root, version_base=VERSION):
        return hydra.compose(options.config_name or ROOT, [*search, *overrides], **how)


def check_strangers(options: Namespace, overrides: list[str]) -> None:
    """Refuses config files of others that change how Hydra runs; what was typed may."""
    searched = [text for text in overrides if text.startswith("hydra.searchpath=")]
    if options.config_dir or options.config_path or options.config_name or searched:
        typed = [text for text in overrides if not text.lstrip("+~").startswith(("hydra.", "hydra/"))]
        own = composed(options, [*searched, *typed], return_hydra_config=True)
        check_hydra(own.hydra, composed(SHIPPED, [], return_hydra_config=True).hydra)


@contextmanager
def explained(options: Namespace, overrides: list[str], check: Check | None = None) -> Iterator[None]:
    """Turns an error of Hydra about a config into a UserError that says what to change."""
    folders = [Path(folder) for folder in (options.config_path or conf_dir(), options.config_dir) if folder]
    groups = group_names(folders)
    searched = any(text.startswith("hydra.searchpath=") for text in overrides)  # then there are options elsewhere too

    def compose_some(pending: list[str]) -> DictConfig:
        return composed(options, [text for text in pending if not text.startswith(("hydra.", "hydra/"))])

    faults, mended = option_faults([] if searched else overrides, folders)
    if faults:
        more = explain(None, mended, compose_some, groups, check) if mended is not None else []
        raise UserError("\n".join(faults + more))
    try:
        with readable(overrides):
            yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{not_utf8(folders)}: is not UTF-8; save it as UTF-8") from error
    except Exception as error:  # Hydra, OmegaConf and the YAML reader have many
        raise UserError("\n".join(explain(error, overrides, compose_some, groups, check))) from error
