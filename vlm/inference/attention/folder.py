"""A folder of pictures of a captioner's attention, for `vlm caption --attention DIR`."""

import os
import re
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch import Tensor

from vlm.data.images.image import ImageError, load_image
from vlm.errors import UserError
from vlm.inference.attention.drawing import AttentionDrawing


class AttentionFolder:
    """Draws the attention of each caption; an observer for `write_results`.

    A picture is complete before its caption is written, so that the records of a killed run have all their pictures.

    Args:
        folder: The folder of the pictures; created if missing.
    Raises:
        UserError: The folder cannot be created, or this model offers no attention maps.
    """

    def __init__(self, captioner: Any, folder: str) -> None:
        self.folder = Path(folder)
        self.drawing = AttentionDrawing(captioner, f"--attention {folder}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise _unwritable(self.folder, fault, 2) from fault
        for line in self.drawing.missing:
            print(f"--attention: {line}", file=sys.stderr)

    def __call__(self, outcome: Any) -> list[dict[str, Any]]:
        path, pixels, names = str(outcome.source), outcome.value, []
        shown = self._shown(path, pixels)
        for rank, caption in enumerate(outcome.result, start=1):
            name = picture_name(path, rank)
            self._write(name, self.drawing.png(pixels, caption, shown))
            names.append({"attention": str(self.folder / name)})
        return names

    def _shown(self, path: str, pixels: Tensor) -> Tensor:
        try:
            return self.drawing.view(load_image(path))
        except ImageError:  # deleted since it was captioned
            return pixels

    def _write(self, name: str, png: bytes) -> None:
        part = self.folder / f".{name}.part"
        try:
            part.write_bytes(png)
            part.replace(self.folder / name)
        except OSError as fault:
            raise _unwritable(self.folder / name, fault, 1) from fault


def picture_name(path: str, rank: int = 1) -> str:
    """The file name of an image's picture: safe and unique for its path."""
    stem = re.sub(r"[^\w.-]", "_", Path(path).stem).lstrip(".")[:40] or "image"
    digest = blake2b(os.fsencode(path), digest_size=4).hexdigest()
    return f"{stem}-{digest}{f'-{rank}' if rank > 1 else ''}.png"


def _unwritable(path: Path, fault: OSError, status: int) -> UserError:
    return UserError(f"--attention {path}: cannot be written ({fault.strerror}); choose another folder", status)
