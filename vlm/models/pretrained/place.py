"""Names a Hugging Face folder and a folder of adapters as one checkpoint; imports no torch."""

import os
from pathlib import Path

JOINT = "+"
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
