"""Small data of images in classes, and what is in a source of it."""

import io
import tarfile

import numpy as np
from PIL import Image


def tiny(path, seed=None):
    """Writes a small image, of noise where a seed is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed or 0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


def lay_out(root, *names):
    for place, name in enumerate(names):
        tiny(root / name, seed=place)


def content(source):
    """Everything a source holds: {split: {id: class}}."""
    splits = {name: source.split(name) for name in source.splits}
    return {
        name: {split.sample_id(0, i): source.classes[split.label(0, i)] for i in range(len(split))}
        for name, split in splits.items()
    }


def png(seed=0):
    """The bytes of a small image."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


def pack(path, folder):
    """A tar of all that a folder holds."""
    with tarfile.open(path, "w") as archive:
        archive.add(folder, arcname=".")
    return path
