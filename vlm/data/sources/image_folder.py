"""Images in folders that name their classes."""

import os
from pathlib import Path

from PIL import Image

from vlm.data.images.image import load_image, read_bytes
from vlm.data.sources.class_files import ClassFiles
from vlm.data.store.storage import stamp
from vlm.errors import Share, UserError


class ImageFolder(ClassFiles):
    """A folder of class folders, as torchvision's ImageFolder reads them, or such a folder for each split.

    Args:
        root: The folder that holds the class folders, or ``train`` and ``val`` (or validation, valid, dev) and
            perhaps ``test`` that hold them.
        val_fraction: Part of each class held out for validation where no folders say the splits.
        test_fraction: Part of each class held out for test where no folders say the splits.
        seed: Seed of which images are held out.
    Raises:
        UserError: If there is no such folder, or it is not laid out so.
    """

    name = "image_folder"

    def __init__(self, *, root: str, val_fraction: Share = 0.1, test_fraction: Share = 0.0, seed: int = 0) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise UserError(f"data.root={root}: no such folder; set data.root to where the class folders are")
        files, folders = _walk(root)
        super().__init__(
            place=str(self.root),
            setting="data.root",
            files=files,
            folders=folders,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            seed=seed,
        )

    def read(self, path: str) -> Image.Image:
        return load_image(self.root / path)

    def content(self, path: str) -> bytes:
        return read_bytes(self.root / path)

    def signature(self, path: str) -> str:
        return stamp(str(self.root / path))


def _walk(root: str) -> tuple[list[str], list[str]]:
    """Every file and every folder within a folder, relative to it. Links to folders are followed, but not in circles.

    Raises:
        UserError: If a folder cannot be read.
    """
    files, found = [], []
    seen = {os.path.realpath(root)}
    for folder, folders, names in os.walk(root, onerror=_unreadable, followlinks=True):
        targets = {name: os.path.realpath(os.path.join(folder, name)) for name in folders if name[0] != "."}
        folders[:] = sorted(name for name, target in targets.items() if target not in seen)
        seen |= set(targets.values())
        inside = "" if folder == root else os.path.relpath(folder, root).replace(os.sep, "/") + "/"
        files += [inside + name for name in names]
        found += [inside + name for name in folders]
    return files, found


def _unreadable(error: OSError) -> None:
    raise UserError(f"{error.filename}: {error.strerror}; give a folder that can be read") from error
