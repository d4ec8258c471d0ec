"""Finds duplicate images by their pixels, and near duplicates by a perceptual hash."""

from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from PIL import Image

SIDE = 16  # side of the thumbnails that are compared
MAX_BITS = 3  # differing bits, of 64, between hashes of near duplicates
MAX_SHIFT, MAX_MEAN, MAX_LOCAL = 16.0, 4.0, 16.0  # of 255: in brightness, on average, at any one pixel
_WORDS = 4  # two hashes that differ in three bits have at least one of four words in common


class ImageHash(NamedTuple):
    """Hashes of an image: of its pixels (`digest`), perceptual (`look`), and a thumbnail uint8 (16, 16, 3)."""

    digest: bytes
    look: int
    small: np.ndarray


def image_hash(image: Image.Image) -> ImageHash:
    """Hashes an RGB image. Each of 64 bits of `look` tells whether a pixel is brighter than its left neighbour."""
    digest = blake2b(f"{image.size}".encode() + image.tobytes(), digest_size=16).digest()
    grey = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    bits = np.packbits(grey[:, 1:] > grey[:, :-1])
    small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), np.uint8)
    return ImageHash(digest, int.from_bytes(bits.tobytes(), "big"), small)


def exact(hashes: Sequence[ImageHash]) -> list[list[int]]:
    """Groups of images with equal pixels."""
    groups = defaultdict(list)
    for index, one in enumerate(hashes):
        groups[one.digest].append(index)
    return [group for group in groups.values() if len(group) > 1]


def near(hashes: Sequence[ImageHash]) -> list[tuple[int, int]]:
    """Pairs of images that look alike without being equal: resized, recompressed, slightly brighter.

    Hashes find candidates and thumbnails decide, because scenes on a plain background have similar hashes.
    """
    if not hashes:
        return []
    looks = np.array([one.look for one in hashes], np.uint64)
    small = np.stack([one.small for one in hashes]).reshape(len(hashes), -1, 3)
    pairs: set[tuple[int, int]] = set()
    for word in range(_WORDS):
        words = (looks >> np.uint64(16 * word)) & np.uint64(0xFFFF)
        order = np.argsort(words, kind="stable")
        starts = np.flatnonzero(np.diff(words[order], prepend=np.uint64(2**20))).tolist()
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            pairs |= _near_within(order[start:end], looks, small)
    return sorted(pair for pair in pairs if hashes[pair[0]].digest != hashes[pair[1]].digest)


def _near_within(members: np.ndarray, looks: np.ndarray, small: np.ndarray) -> set[tuple[int, int]]:
    pairs = set()
    for place, one in enumerate(members[:-1].tolist()):
        others = members[place + 1 :]
        others = others[np.bitwise_count(looks[others] ^ looks[one]) <= MAX_BITS]
        if len(others) == 0:
            continue
        gaps = small[others].astype(np.float32) - small[one].astype(np.float32)  # (M, 256, 3)
        shift = gaps.mean(1, keepdims=True)
        local = np.abs(gaps - shift)
        alike = (np.abs(shift).max((1, 2)) <= MAX_SHIFT) & (local.mean((1, 2)) <= MAX_MEAN)
        alike &= local.max((1, 2)) <= MAX_LOCAL
        pairs |= {(min(one, other), max(one, other)) for other in others[alike].tolist()}
    return pairs
