"""Names two places as one checkpoint: a folder with adapters, or a GGUF file with its mmproj file; imports no torch."""

import os
from pathlib import Path

JOINT, SUFFIX = "+", ".gguf"
BASE_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"


def join_adapters(base: str | os.PathLike[str], adapters: str | os.PathLike[str]) -> str:
    """Returns the name of both folders as one checkpoint, BASE+ADAPTERS."""
    return f"{Path(base)}{JOINT}{Path(adapters)}"


def split_adapters(place: str | os.PathLike[str]) -> tuple[Path, Path] | None:
    """Returns both folders of a name that `join_adapters` made; None for any other checkpoint."""
    text = os.fspath(place)
    if JOINT not in text or os.path.exists(text):
        return None
    words = text.split(JOINT)
    for count in range(1, len(words)):
        base, adapters = Path(JOINT.join(words[:count])), Path(JOINT.join(words[count:]))
        if (base / BASE_CONFIG).is_file() and (adapters / ADAPTER_CONFIG).is_file():
            return base, adapters
    return None


def join_pair(model: str | os.PathLike[str], projector: str | os.PathLike[str]) -> str:
    """Returns the name of both files as one checkpoint, MODEL.gguf+MMPROJ.gguf."""
    return f"{os.fspath(model)}{JOINT}{os.fspath(projector)}"


def split_pair(place: str | os.PathLike[str]) -> tuple[Path, Path] | None:
    """Returns both files of a name that `join_pair` made; None for any other checkpoint."""
    text = os.fspath(place)
    model, middle, projector = text.partition(f"{SUFFIX}{JOINT}")
    if not middle or not projector.lower().endswith(SUFFIX) or os.path.exists(text):
        return None
    return Path(f"{model}{SUFFIX}"), Path(projector)


def resolve_place(place: str | os.PathLike[str]) -> str:
    """Returns the absolute path of a checkpoint, or both of joined places."""
    joined = split_adapters(place) or split_pair(place) or (Path(place),)
    return JOINT.join(str(path.resolve()) for path in joined)
