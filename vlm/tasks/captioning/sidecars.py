"""Sidecars: the caption of photo.jpg in photo.txt beside it, a format for training image generators."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm.errors import UserError
from vlm.io.atomic import write_text
from vlm.io.output import Output, Records


def sidecar(image: str) -> Path:
    """Returns the file of an image's caption."""
    return Path(image).with_suffix(".txt")


def without_sidecars(paths: Sequence[str], *, overwrite: bool) -> list[str]:
    """Returns the images that have still to be captioned.

    Args:
        overwrite: Whether to include those that have a sidecar.
    Raises:
        UserError: Two images would share a sidecar.
    """
    owners: dict[Path, str] = {}
    for path in paths:
        if (other := owners.setdefault(sidecar(path), path)) != path:
            raise UserError(f"--sidecar: {other} and {path} would share {sidecar(path)}; rename one of them")
    return [path for path in paths if overwrite or not sidecar(path).exists()]


class Sidecars(Records):
    """Records whose texts are written beside their images, each file completely or not at all."""

    def __init__(self) -> None:
        super().__init__(form="text", fields=("image", "caption"), output=Output(None))

    def write(self, record: Mapping[str, Any]) -> None:
        path = sidecar(record["image"])
        try:
            write_text(path, f"{record['caption']}\n")
        except OSError as fault:
            raise UserError(f"{path}: cannot be written ({fault.strerror}); free space, or allow writing", 1) from fault
