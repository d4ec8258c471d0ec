"""A folder of pictures of where a captioner looked, for `vlm caption --attention DIR`."""

import os
import re
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from vlm.data.images.image import ImageError, Preprocess, load_image
from vlm.errors import UserError
from vlm.inference.attention import Attention, has_class_token, read_attention, what_is_missing
from vlm.inference.attention_picture import TILE, Band, bands_picture
from vlm.inference.predictor import normalized

BY_CLASS = "encoder, last layer: what the class token attends to, head by head"
BY_PATCHES = "encoder, last layer: what the patches attend to on their mean, head by head (it has no class token)"


class AttentionFolder:
    """Draws each caption of an image, as the observer of `caption_files`.

    A picture is in its place, whole, before its caption is written: what a killed run has left needs no second look.

    Args:
        folder: The folder of the pictures; it is made.
    Raises:
        UserError: The folder cannot be made, or nothing of this model's attention can be read.
    """

    def __init__(self, captioner: Any, folder: str) -> None:
        self.captioner, self.folder = captioner, Path(folder)
        blank = captioner.pixels(Image.new("RGB", (1, 1)))[None].to(captioner.device)
        missing = what_is_missing(captioner.model, normalized(captioner.model, captioner.preprocess, blank))
        if len(missing) > 1:
            raise UserError(f"--attention {folder}: {'; '.join(missing)}; leave it out for this model")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise _unwritable(self.folder, fault, 2) from fault
        for line in missing:
            print(f"--attention: {line}", file=sys.stderr)
        self.title = BY_CLASS if has_class_token(captioner.model.encoder) else BY_PATCHES
        # What the model sees, only finer.
        self.view = Preprocess(**{**captioner.preprocess.state(), "image_size": TILE})

    def __call__(self, path: str, pixels: Tensor, captions: Sequence[Any]) -> list[dict[str, Any]]:
        shown, names = self._shown(path, pixels), []
        for rank, caption in enumerate(captions, start=1):
            attention = self._read(pixels, caption.tokens)
            bands: list[Band] = [(caption.text, attention.words)]
            bands += [(self.title, attention.heads)] if attention.heads else []
            name = picture_name(path, rank)
            self._write(name, bands_picture(shown, bands))
            names.append({"attention": str(self.folder / name)})
        return names

    def _read(self, pixels: Tensor, tokens: Sequence[int]) -> Attention:
        it = self.captioner
        return read_attention(it.model, it.tokenizer, it.preprocess, pixels.to(it.device), tokens)

    def _shown(self, path: str, pixels: Tensor) -> Tensor:
        try:
            return self.view(load_image(path))
        except ImageError:  # gone since it was captioned
            return pixels

    def _write(self, name: str, png: bytes) -> None:
        part = self.folder / f".{name}.part"
        try:
            part.write_bytes(png)
            part.replace(self.folder / name)
        except OSError as fault:
            raise _unwritable(self.folder / name, fault, 1) from fault


def picture_name(path: str, rank: int = 1) -> str:
    """The file of an image's picture: told by the path alone, safe, and not shared by two paths of one file name."""
    stem = re.sub(r"[^\w.-]", "_", Path(path).stem).lstrip(".")[:40] or "image"
    digest = blake2b(os.fsencode(path), digest_size=4).hexdigest()
    return f"{stem}-{digest}{f'-{rank}' if rank > 1 else ''}.png"


def _unwritable(path: Path, fault: OSError, status: int) -> UserError:
    return UserError(f"--attention {path}: cannot be written ({fault.strerror}); choose another folder", status)
