"""Names a decoder's GGUF file and its mmproj file as one checkpoint; imports no torch."""

import os
from pathlib import Path

JOINT, SUFFIX = "+", ".gguf"


def join_pair(model: str | os.PathLike[str], projector: str) -> str:
    """Returns the name of both files as one checkpoint, MODEL.gguf+MMPROJ.gguf."""
    return f"{os.fspath(model)}{JOINT}{projector}"


def split_pair(place: str | os.PathLike[str]) -> tuple[Path, Path] | None:
    """Returns both files of a name that `join_pair` made; None for any other checkpoint."""
    text = os.fspath(place)
    model, middle, projector = text.partition(f"{SUFFIX}{JOINT}")
    if not middle or not projector.lower().endswith(SUFFIX) or os.path.exists(text):
        return None
    return Path(f"{model}{SUFFIX}"), Path(projector)
