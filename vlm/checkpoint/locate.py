"""Finds the checkpoint that a user names: `last`, a run, a file or a hub model, with an image encoder or adapters."""

import os
import re
from pathlib import Path
from typing import Any

from vlm.errors import UserError, did_you_mean, find_similar
from vlm.models.pretrained.place import ADAPTER_CONFIG, BASE_CONFIG, SUFFIX, join_adapters, join_pair

BEST = ("best.ckpt", "last.ckpt")  # in order of preference
LAST = "last"  # the newest run under RUNS
RUNS = Path("runs")
# Entries of folders that are a run, a model or an evaluation, in which no run is searched.
COMPLETE = ("checkpoints", "config.yaml", "config.json", "vlm.json", "graphs.json", "metrics.json", *BEST)


def run_folders(runs: Path) -> list[Path]:
    """Returns the runs with checkpoints in a folder of runs, or of runs of one name, the most recently saved first."""
    checkpoints = [*runs.glob("*/*/checkpoints/*.ckpt"), *runs.glob("*/checkpoints/*.ckpt")]
    saved: dict[Path, float] = {}
    for path in checkpoints:
        folder = path.parent.parent
        if path.is_file():  # not a broken link
            saved[folder] = max(saved.get(folder, 0.0), path.stat().st_mtime)
    return sorted(saved, key=lambda folder: saved[folder], reverse=True)


def possible_folders(place: str | os.PathLike[str]) -> list[Path]:
    """Returns the folders that a path or the name of runs may mean: the path itself, then the name under RUNS."""
    path = Path(place)
    return [path, RUNS / path] if len(path.parts) == 1 and path.name not in ("", "..") else [path]


def find_run(place: str | os.PathLike[str]) -> Path:
    """Returns the folder of the newest run, for `last`, a name of runs, or a folder of runs; else the path itself.

    Raises:
        UserError: There is no run, for `last`.
    """
    if os.fspath(place) == LAST:
        if folders := run_folders(RUNS):
            return folders[0]
        raise UserError(f"{LAST}: there is no run with a checkpoint under {RUNS}/; name a run's folder or a .ckpt file")
    path = Path(place)
    if path.is_file() or any((path / name).exists() for name in COMPLETE):
        return path
    for folder in possible_folders(place):
        if folder.is_dir() and (runs := run_folders(folder)):
            return runs[0]
    return path


def suggest_run(place: str | os.PathLike[str]) -> str:
    """Returns the end of a message about a run that does not exist, if runs have a similar name."""
    names = {folder.relative_to(RUNS).parts[0] for folder in run_folders(RUNS)}
    name = find_similar(Path(place).name, names)
    return did_you_mean(f"{RUNS / name}" if name else "")


def missing_checkpoint_error(path: str | os.PathLike[str]) -> UserError:
    """Returns the error about a path at which there is no checkpoint."""
    where = "give a run's folder, or a .ckpt file as under runs/NAME/TIME/checkpoints/"
    if (folder := Path(path)).is_dir():
        if (folder / "checkpoints").is_dir():
            lacks = f"its checkpoints/ has neither {' nor '.join(BEST)}; its run stopped before it saved"
        else:
            lacks = "it has neither config.json (of a Hugging Face model) nor checkpoints/ (of a run)"
        return UserError(f"{path}: no checkpoint in this folder: {lacks}; {where}")
    return UserError(f"{path}: no such checkpoint; {where}{suggest_run(path)}")


def find_best_checkpoint(place: str | os.PathLike[str]) -> Path:
    """Returns the best checkpoint of a run; arguments as in `find_run`, and other paths are returned unchanged.

    Raises:
        UserError: There is no run, or the path cannot be accessed.
    """
    try:
        path = find_run(place)
        candidates = [path / folder / name for folder in ("checkpoints", "") for name in BEST]
        return next((file for file in candidates if file.is_file()), path) if path.is_dir() else path
    except OSError as fault:
        raise UserError(f"{place}: cannot be read ({fault.strerror}); give the path of a .ckpt file") from fault


PREFIX = "hf:"
# Files of a model, its tokenizer and its preprocessing; weights are in one file or in numbered parts.
FILES = [
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json", "config.json"),
    *("generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"),
    *("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "tokenizer.model"),
    *("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
]
_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)


def download(place: str | os.PathLike[str], *, local: bool = False) -> Path:
    """Returns the path of a place; a model of the hub is downloaded, and its folder in the cache returned.

    Args:
        local: Whether only the cache is searched, for a model that a file names and not the user.
    Raises:
        UserError: It cannot be downloaded, and is not in the cache.
    """
    text = os.fspath(place)
    if not text.startswith(PREFIX):
        return Path(text)
    model = text.removeprefix(PREFIX)
    if not _NAME.fullmatch(model):
        raise UserError(f"{text}: is not a model of the hub; write hf:ORG/NAME or hf:ORG/NAME@REVISION")
    name, _, revision = model.partition("@")
    try:
        import huggingface_hub
    except ImportError as fault:
        raise UserError(
            f'{text}: huggingface_hub is not installed; pip install "vlm-lightning[hf]", or {_manual_download(name)}'
        ) from fault
    try:
        # The library reads the address of a mirror only when it is imported, which in a notebook is too early.
        options: Any = {"endpoint": os.environ.get("HF_ENDPOINT") or None, "allow_patterns": FILES}
        folder = huggingface_hub.snapshot_download(name, revision=revision or None, local_files_only=local, **options)
    except Exception as fault:  # the library, its client and the system raise many types
        reason = next((line for line in str(fault).splitlines() if line.strip()), type(fault).__name__)
        raise UserError(f"{text}: cannot be downloaded ({reason.strip()[:200]}); {_manual_download(name)}") from fault
    return Path(folder)


def _manual_download(name: str) -> str:
    files = "config.json, model.safetensors, tokenizer.json, preprocessor_config.json"
    return f"put {files} of huggingface.co/{name} into a folder, and give that folder"


def check_checkpoint(place: str) -> None:
    """Checks that a local checkpoint exists; checkpoints of the Hub are not checked.

    Raises:
        UserError: There is none.
    """
    if not place.startswith(PREFIX) and not (path := find_best_checkpoint(place)).exists():
        raise missing_checkpoint_error(path)


def check_projector(place: str, key: str = "--mmproj ") -> None:
    """Checks that an mmproj file exists.

    Args:
        key: Option or config key, for messages.
    Raises:
        UserError: It does not, or is no GGUF file.
    """
    if not os.path.isfile(place) or not place.lower().endswith(SUFFIX):
        raise UserError(f"{key}{place}: no such GGUF file; give the mmproj-*.gguf of the model")


def add_projector(checkpoint: str, projector: str | None, *, key: str = "--mmproj ") -> str:
    """Returns a checkpoint with the image encoder of another GGUF file.

    Args:
        key: See `check_projector`.
    Raises:
        UserError: The checkpoint is not a GGUF file.
    """
    if projector is None:
        return checkpoint
    if not checkpoint.lower().endswith(SUFFIX):
        raise UserError(f"{key}{projector}: is for GGUF files; {checkpoint} is none, so leave it out")
    check_projector(projector, key)
    return join_pair(checkpoint, projector)


def check_adapters(place: str, key: str = "--adapters ") -> None:
    """Checks that a folder of adapters exists.

    Args:
        key: Option or config key, for messages.
    Raises:
        UserError: It does not.
    """
    if not os.path.isfile(os.path.join(place, ADAPTER_CONFIG)):
        raise UserError(f"{key}{place}: has no {ADAPTER_CONFIG}; give a folder written by peft")


def add_adapters(checkpoint: str, adapters: str | None, *, key: str = "--adapters ") -> str:
    """Returns a checkpoint with adapters.

    Args:
        key: See `check_adapters`.
    Raises:
        UserError: The checkpoint is not a Hugging Face folder.
    """
    if adapters is None:
        return checkpoint
    base = download(checkpoint)
    if not os.path.isfile(base / BASE_CONFIG):
        raise UserError(f"{key}{adapters}: is for Hugging Face folders; {checkpoint} is none, so leave it out")
    check_adapters(adapters, key)
    return join_adapters(base, adapters)


def join_places(checkpoint: str, *, mmproj: str | None, adapters: str | None) -> str:
    """Returns a checkpoint with what --mmproj and --adapters add.

    Raises:
        UserError: They do not belong to a checkpoint of this kind.
    """
    return add_adapters(add_projector(checkpoint, mmproj), adapters)
