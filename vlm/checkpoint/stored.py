"""Limits of a checkpoint's config, which anybody may have written; imports no torch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from vlm.config.target import expand_name, find, shorten_name, signature, suggest_trust, trusted_packages
from vlm.config.tree import FORMULAS, Config, Tree, Value, escape, put, resolve, select
from vlm.errors import UserError
from vlm.untrusted.sizes import check_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from vlm.models.pretrained.stack import Spec

FORMAT = 2  # of checkpoints


class Base(TypedDict):
    """The base weights of adapters: where they were, and their hash."""

    place: str
    hash: str


class Adapters(TypedDict, total=False):
    """The entry of adapters: their scale, the adapted layers, the base of each part, the weights without a base."""

    scale: float
    layers: int
    base: dict[str, Base]
    fresh: list[str]


class DecodingDefaults(TypedDict, total=False):
    """Decoding options of a model by vlm's names; see `vlm.inference.options.DecodingOptions`."""

    beam: int
    results: int
    length_penalty: float
    no_repeat_ngram: int
    repetition_penalty: float
    min_tokens: int
    max_tokens: int
    sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    groups: int
    diversity: float
    seed: int
    early_stopping: bool | Literal["never"]
    end_counts: bool
    forced_end: bool
    ends: Sequence[int]
    never: Sequence[int]


class Metadata(TypedDict, total=False):
    """The entry "vlm" of a checkpoint: what inference reads besides weights. Which keys there are depends on the task.

    Args:
        task: Name of the task.
        model: Specification of the model; None while a folder's has no head.
        config: Config of the run, as `freeze` returns it; models of other projects have none.
        data: Fingerprint of the data set.
        typed: Overrides of the run.
        origin: Hugging Face class of the folder from which the model came.
        base_class: The same of the folder from which a training started.
        scores: Scores of the last evaluation by name.
        tokenizer, preprocess, form: States of the tokenizer, the preprocessing and the form of prompts.
        classes: Names of classes, each as one text or, for combinations, several.
        max_len, max_tokens: Longest input and output in tokens.
        pairs: Whether texts are pairs; None if unknown.
        stride, longest, abstains, marks_shared: Options of span answering.
        decoding, embedding, drawing: Default options by name.
        codebook: State of the codebook of image tokens.
        adapters: Adapters of a model that is stored without its base; `read` moves the entry out.
        reference: Hash of the weights of the reference model of training on preferences.
        teacher: Hash of the weights of the teacher of a distillation.
    """

    task: str | None
    model: "Spec | None"
    config: dict[str, Any]
    data: str
    typed: list[str]
    adapters: Adapters
    origin: str
    base_class: str
    scores: dict[str, float]
    tokenizer: dict[str, Any]
    preprocess: dict[str, Any]
    form: dict[str, Any]
    classes: Sequence[str] | Sequence[Sequence[str]]
    max_len: int
    max_tokens: int
    pairs: bool | None
    stride: int
    longest: int
    abstains: bool
    marks_shared: bool
    decoding: DecodingDefaults
    embedding: dict[str, str | bool]
    drawing: dict[str, float]
    codebook: dict[str, Any]
    reference: str
    teacher: str


class Checkpoint(TypedDict, total=False):
    """The content of a checkpoint file by Lightning's names, of which inference reads the first three and `ema`."""

    format: int
    vlm: Metadata
    state_dict: "Mapping[str, Tensor]"
    ema: "Mapping[str, Tensor]"
    adapters: Adapters
    global_step: int
    epoch: int
    loops: dict[str, Any]
    optimizer_states: list[dict[str, Any]]


TARGET, CLASS = "_target_", "_class_"  # key of a class's name, in composed and in stored configs
MAX_LINKS = 2000
GROUPS = ("data", "model", "task", "optim", "schedule", "trainer", "callbacks", "logger")
# Classes of Lightning that neither write outside of the run's folder nor reach the network.
_LIGHTNING = {
    "lightning.Trainer": "",
    "lightning.pytorch.callbacks.": "DeviceStatsMonitor EarlyStopping LearningRateMonitor ModelSummary "
    "RichModelSummary RichProgressBar StochasticWeightAveraging TQDMProgressBar Timer",
    "lightning.pytorch.loggers.": "TensorBoardLogger",
    "lightning.pytorch.strategies.": "DDPStrategy ModelParallelStrategy SingleDeviceStrategy",
}
_ALLOWED = {head + name for head, names in _LIGHTNING.items() for name in names.split() or [""]}
# Arguments with which a data source uses the network or writes; each with the variable that allows it.
_USER_OPTIONS = {"download": "", "remote": "VLM_REMOTE", "write_index": ""}
# Arguments that say where to write; the program fills them in.
_PLACES = {"default_root_dir", "dir", "dirpath", "filename", "folder", "log_dir", "plugins", "root_dir", "save_dir"}


def freeze(config: Value) -> Value:
    """Returns a config as checkpoints store it: with short names of classes, which stay valid if a module is moved."""
    if isinstance(config, dict):
        named = {key: freeze(child) for key, child in config.items() if key != TARGET}
        return {CLASS: shorten_name(str(config[TARGET])), **named} if TARGET in config else named
    return [freeze(child) for child in config] if isinstance(config, list) else config


def thaw(stored: Any) -> Config:
    """Returns the config of a checkpoint as it was composed, with the dotted names of this version of vlm.

    Raises:
        UserError: It is not a config, interpolates more than keys and FORMULAS, names a class or a path that only the
            user may choose, or has a size out of bounds.
    """
    tree = restore_interpolations(stored)
    config = resolve(tree)
    try:
        check_sizes({"config": config})
    except ValueError as fault:
        raise UserError(f"{fault}; use another checkpoint") from fault
    kinds = {"seed": int, "name": str, "runs": str, "task_name": str} | dict.fromkeys(GROUPS, dict)
    if wrong := [key for key, kind in kinds.items() if not isinstance(config.get(key), kind)]:
        raise UserError(f"the checkpoint's config is not one of vlm ({', '.join(wrong)}); use another checkpoint")
    # Both are checked, because an interpolation may move a value from one key to another.
    if faults := list(dict.fromkeys([*_find_faults(tree, ""), *_find_faults(config, "")])):
        raise UserError(
            f"the checkpoint's config is refused, because checkpoints are untrusted:\n{'; '.join(faults[:5])}"
        )
    return resolve(cast(Tree, _restore_targets(tree)))


def restore_interpolations(stored: Any) -> Tree:
    """Returns the tree of a stored config.

    Older configs were stored resolved, together with the keys that fed others (`fed`) and the formulas (`computed`). An
    interpolation is restored wherever it gives the stored value; other values stay as they are.

    Raises:
        UserError: It is not a config.
    """
    try:
        if not isinstance(stored, dict) or "fed" not in stored:
            return {**stored}
        tree = escape({key: value for key, value in stored.items() if key not in ("fed", "computed")})
        links = [(source, target) for source, targets in stored["fed"].items() for target in targets]
        for source, target in links[:MAX_LINKS]:
            value, fed = select(stored, target, ...), select(stored, source, ...)
            if (text := _find_interpolation(stored, source, target, value, fed)) is not None:
                put(tree, target, text)
        return tree
    except (AttributeError, KeyError, TypeError, ValueError) as fault:
        raise UserError("the checkpoint's config is not one of vlm; use another checkpoint") from fault


def _find_interpolation(stored: dict[str, Any], source: str, target: str, value: Any, fed: Any) -> str | None:
    """Returns the interpolation that gave a value of an older config, or None if the value was overridden."""
    if ... in (value, fed):
        return None
    if target not in stored["computed"]:
        return f"${{{source}}}" if value == fed else None
    if (formula := stored["computed"][target]) is None:  # joined from texts
        together = isinstance(value, str) and isinstance(fed, str) and fed in value and "${" not in value
        return value.replace(fed, f"${{{source}}}", 1) if together else None
    name, *terms = formula
    values = [select(stored, term) if isinstance(term, str) else term for term in terms]
    text = ",".join(f"${{{term}}}" if isinstance(term, str) else str(term) for term in terms)
    return f"${{{name}:{text}}}" if FORMULAS[name](*values) == value else None


def _restore_targets(value: Value) -> Value:
    if isinstance(value, dict):
        named = {key: _restore_targets(child) for key, child in value.items() if key != CLASS}
        return {TARGET: expand_name(str(value[CLASS])), **named} if CLASS in value else named
    return [_restore_targets(child) for child in value] if isinstance(value, list) else value


def isolate_config(config: Tree, folder: Path) -> Tree:
    """Returns a checkpoint's config, or its tree, that fetches nothing and keeps its cache near the checkpoint.

    Nor does it write beside its data. With VLM_REMOTE=1 in the environment it may read data at the URLs that it names.

    Args:
        folder: The checkpoint's run.
    """
    # The shared cache of the run's parent folder is used if it exists; it is never created there.
    runs = folder.resolve().parent.parent
    shares_cache = Path(str(config["runs"])).resolve() == runs and (runs / "cache").is_dir()
    return {**cast(Tree, _disable_downloads(config)), "runs": str(config["runs"] if shares_cache else folder)}


def _disable_downloads(value: Value) -> Value:
    if isinstance(value, dict):
        off = {key for key, allowed in _USER_OPTIONS.items() if os.environ.get(allowed) != "1"}
        enabled = {key: _disable_downloads(child) for key, child in value.items() if key not in off}
        accepted = signature(value[TARGET]).arguments if TARGET in value else {}
        return enabled | {key: False for key in off if key in value or key in accepted}
    return [_disable_downloads(child) for child in value] if isinstance(value, list) else value


def _find_faults(value: Value, path: str) -> Iterator[str]:
    if isinstance(value, list | tuple):
        value = {str(index): child for index, child in enumerate(value)}
    if not isinstance(value, dict):
        return
    for key, child in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key == TARGET:
            yield f"{where}: a checkpoint names classes by {CLASS}"
        elif key == CLASS and (fault := _check_class(child)):
            yield f"{where}: {fault}"
        elif key in _PLACES and path.split(".")[0] in ("callbacks", "logger", "trainer"):
            yield f"{where}: a checkpoint may not set it"
        yield from _find_faults(child, where)


def _check_class(name: Any) -> str | None:
    """Returns the reason why a checkpoint may not name a class, or None."""
    try:
        target = expand_name(name)
        find(target)
    except UserError as fault:
        package = str(name).partition(".")[0]
        theirs = "." in str(name) and package not in ("vlm", "lightning", "torch", *trusted_packages())
        return f"{fault}; {suggest_trust(package)}" if theirs else str(fault)
    if target in _ALLOWED or not target.startswith("lightning."):
        return None
    return f"{str(name)[:100]} is not allowed in a checkpoint"
