"""Small data of images in classes."""

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
