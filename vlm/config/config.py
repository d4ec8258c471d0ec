"""Composes configs with Hydra, and is the face of what checks and builds them.

Hydra's command line stays whole, but it makes no folder and no log of its own, and its errors leave as ours: a line or
two that name the key, and exit status 2.
"""

import io
import os
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from vlm.config.check import build, check, misfit, spec, supply, takes
from vlm.config.faults import Check, explain, group_names, not_utf8, option_faults
from vlm.config.links import FORMULAS, links
from vlm.config.overrides import apply, check_effective, check_resume_overrides, parse, plain, quote, split_resume
from vlm.config.stored import contained, freeze, thaw
from vlm.config.target import load, trust, trusted
from vlm.config.untrusted import check_hydra, readable
from vlm.errors import UserError, print_error

__all__ = [
    "build",
    "check",
    "check_resume_overrides",
    "compose",
    "conf_dir",
    "contained",
    "freeze",
    "load",
    "misfit",
    "node",
    "override",
    "report",
    "run",
    "spec",
    "split_resume",
    "supply",
    "takes",
    "thaw",
    "trust",
    "trusted",
    "values_of",
]

# Keys that stand in a group only for the nodes below it to refer to.
_REFERRED = {
    "data": {"root", "path", "val_path", "test_path", "image_size"},
    "model": {"size", "position", "init_from"},
}

_ANYWHERE = {"init_from"}  # of any part

Main = Callable[[dict[str, Any]], int | None]

_ROOT = "config"
_SHIPPED = Namespace(config_path=None, config_name=None, config_dir=None)
_VERSION = "1.3"  # of Hydra's behaviour
_NO_LOGGING = "{version: 1, root: null}"
# A run keeps its own folder and log: Hydra is to leave nothing behind.
_OURS = (
    "hydra.run.dir=.",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra.job.name=train",
    "hydra.job.chdir=false",
    f"++hydra.job_logging={_NO_LOGGING}",
    f"++hydra.hydra_logging={_NO_LOGGING}",
)

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


def compose(overrides: list[str]) -> dict[str, Any]:
    """Composes the config with overrides, resolved to plain containers.

    Raises:
        UserError: It cannot be composed; a line for each fault.
    """
    quoted = [quote(text) for text in overrides]
    with _explained(_SHIPPED, quoted):
        return _linked(_composed(_SHIPPED, quoted))


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
    with _explained(_SHIPPED, quoted):
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
            node = OmegaConf.select(_composed(_SHIPPED, [text]), key)
            chosen[key] = OmegaConf.to_container(node, resolve=False)
        applied, taken = apply(config, values, chosen)
    if unread is not None:
        referred = {f"{group}.{name}" for group, names in _REFERRED.items() for name in names}
        check_effective(
            config, applied, taken | {key: [] for key in chosen}, lambda key: key in referred or unread(key)
        )
    return applied


def run(main: Main, argv: list[str], check: Check | None = None, suit: Check | None = None) -> int:
    """Runs ``main`` with the config that a command line in Hydra's own form asks for; once for each job of a sweep.

    Args:
        main: Takes the config, resolved to plain containers, and returns its exit status, or None for 0.
        argv: The command line, without the program's name.
        check: What ``main`` checks a config by. Where composing finds faults, it is asked for what else is wrong, so
            that all is said at once.
        suit: Raises a UserError where the chosen options do not suit one another, which may be why a key that one
            refers to is not there; it is given a config that is not resolved.
    Returns:
        The exit status, the worst one of a sweep; 2 where the config or the command line is at fault.
    """
    try:
        options = _parse(argv)
        overrides = [quote(text, _sweeps(options)) for text in options.overrides]
        with _explained(options, overrides, check):
            _check_strangers(options, overrides)
            return _run(lambda config: main(_resolved(config, suit)), options, overrides, prefix=_prefix(argv))
    except UserError as fault:
        return report(fault)
    except KeyboardInterrupt:
        return 130
    except SystemExit as exit:  # --version
        return int(bool(exit.code))


def report(fault: UserError) -> int:
    """Prints a fault for the user and returns its exit status; with VLM_DEBUG=1, a traceback too."""
    if os.environ.get("VLM_DEBUG") == "1":
        traceback.print_exception(fault)
    print_error(fault)
    return fault.status


def _linked(config: DictConfig) -> dict[str, Any]:
    """A config in plain containers, with which keys each key feeds."""
    return {**plain(config), **links(config)}


def _resolved(config: DictConfig, suit: Check | None) -> dict[str, Any]:
    try:
        return _linked(config)
    except UserError as fault:
        if suit and isinstance(fault.__cause__, InterpolationKeyError):
            suit(dict(OmegaConf.to_container(config, resolve=False)))  # type: ignore[arg-type]
        raise


def _run(main: Callable[[DictConfig], int | None], options: Namespace, overrides: list[str], prefix: list[str]) -> int:
    statuses: list[int] = []
    process, typed = os.getpid(), sys.argv

    def job(config: DictConfig) -> int:
        own = HydraConfig.get()
        command = typed
        if _sweeps(options):
            # What Lightning starts again for each further device is this job, not the sweep.
            command = [*prefix, *_flags(options, "config_path", "config_name", "config_dir"), *own.overrides.task]
            print(f"job {own.job.num}: {' '.join(own.overrides.task)}", file=sys.stderr)
        status = _call(main, config, command)
        statuses.append(status)
        if status >= 128:  # a signal means the whole sweep
            raise SystemExit(status)
        if status and os.getpid() != process:  # a launcher's process, whose list of statuses is not ours
            raise UserError(f"job {own.job.num} ended with status {status}", status)
        return status

    with ExitStack() as stack:
        ours = list(_OURS)
        if _sweeps(options):
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="vlm-sweep-"))
            ours.append(quote(f"hydra.sweep.dir={scratch}"))
        stack.enter_context(_environment("HYDRA_FULL_ERROR", "1"))  # raise, rather than print and exit
        stack.enter_context(_argv([prefix[0], *_flags(options), *ours, *overrides]))
        said = stack.enter_context(redirect_stderr(io.StringIO())) if options.cfg else io.StringIO()
        try:
            hydra.main(str(conf_dir()), _ROOT, _VERSION)(job)()
        except SystemExit as exit:
            if exit.code and not statuses:
                raise UserError(said.getvalue().strip() or "Hydra gave up on this command line") from None
    return max(statuses, default=0)


def _call(main: Callable[[DictConfig], int | None], config: DictConfig, command: list[str]) -> int:
    """Runs one job as if Hydra were not there; nothing but a signal gets past."""
    holder = HydraConfig.instance()
    hydras, holder.cfg = holder.cfg, None  # with it set, Lightning starts further processes in a way of its own
    try:
        with _argv(command):
            return main(config) or 0
    except UserError as fault:
        return report(fault)
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        holder.cfg = hydras


def _parse(argv: list[str]) -> Namespace:
    """Hydra's flags and the overrides, which may stand in any order."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            options = get_args_parser().parse_intermixed_args(argv)
    except SystemExit as exit:
        if not exit.code:
            raise
        reason = said.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"{reason}; values are given as KEY=VALUE, such as trainer.max_epochs=5") from None
    for text in options.overrides:
        if "=" not in text and not text.startswith("~"):
            raise UserError(f"{text}: is not of the form KEY=VALUE, such as trainer.max_epochs=5")
    for name in ("config_path", "config_dir"):
        folder = getattr(options, name)
        if folder and "://" not in folder:
            if not os.path.isdir(folder):
                raise UserError(f"--{name.replace('_', '-')} {folder}: no such folder")
            setattr(options, name, os.path.abspath(folder))
    return options


def _sweeps(options: Namespace) -> bool:
    return options.multirun or "hydra.mode=MULTIRUN" in options.overrides


def _flags(options: Namespace, *names: str) -> list[str]:
    """Writes parsed flags out again, all of them or those named."""
    chosen = {name: getattr(options, name) for name in names} if names else vars(options)
    flags = []
    for name, value in chosen.items():
        if value and name != "overrides":
            flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return flags


def _prefix(argv: list[str]) -> list[str]:
    """What stands before the arguments: the program, and the name of its command."""
    before = len(sys.argv) - len(argv)
    return sys.argv[:before] if before > 0 and sys.argv[before:] == argv else sys.argv[:1]


def _check_strangers(options: Namespace, overrides: list[str]) -> None:
    """Looks at what config files that are not ours do to Hydra; what was typed is let be."""
    searched = [text for text in overrides if text.startswith("hydra.searchpath=")]
    if options.config_dir or options.config_path or options.config_name or searched:
        typed = [text for text in overrides if not text.lstrip("+~").startswith(("hydra.", "hydra/"))]
        own = _composed(options, [*searched, *typed], return_hydra_config=True)
        check_hydra(own.hydra, _composed(_SHIPPED, [], return_hydra_config=True).hydra)


def _composed(options: Namespace, overrides: list[str], **how: bool) -> DictConfig:
    search = []
    if options.config_dir:
        folder = quote(f"path=file://{Path(options.config_dir).resolve()}").removeprefix("path=")
        search = [f"hydra.searchpath=[{folder}]"]
    root = options.config_path or str(conf_dir())
    with hydra.initialize_config_dir(root, version_base=_VERSION):
        return hydra.compose(options.config_name or _ROOT, [*search, *overrides], **how)


@contextmanager
def _explained(options: Namespace, overrides: list[str], check: Check | None = None) -> Iterator[None]:
    """Turns what Hydra raises about a config into a UserError that says what to change."""
    folders = [Path(folder) for folder in (options.config_path or conf_dir(), options.config_dir) if folder]
    groups = group_names(folders)
    searched = any(text.startswith("hydra.searchpath=") for text in overrides)  # then there are options elsewhere too

    def composed(pending: list[str]) -> DictConfig:
        return _composed(options, [text for text in pending if not text.startswith(("hydra.", "hydra/"))])

    found, mended = option_faults([] if searched else overrides, folders)
    if found:
        more = explain(None, mended, composed, groups, check) if mended is not None else []
        raise UserError("\n".join(found + more))
    try:
        with readable(overrides):
            yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{not_utf8(folders)}: is not UTF-8; save it as UTF-8") from error
    except Exception as error:  # Hydra, OmegaConf and the YAML reader have many; jobs let none through
        raise UserError("\n".join(explain(error, overrides, composed, groups, check))) from error


@contextmanager
def _argv(argv: list[str]) -> Iterator[None]:
    saved, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = saved


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    saved = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if saved is None:
            del os.environ[name]
        else:
            os.environ[name] = saved
