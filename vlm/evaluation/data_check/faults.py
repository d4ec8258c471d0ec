"""Checks of a data set for problems before training, duplicate images among them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

import numpy as np
from PIL import Image

from vlm.data.fields import CaptionField
from vlm.data.images.image import ImageError
from vlm.data.records import SkipMessage, Source, Split
from vlm.data.text.tokenizer import ByteTokenizer, Tokenizer
from vlm.io.files import progress
from vlm.machine import cores

SIDE = 16  # side of the thumbnails that are compared
MAX_BITS = 3  # differing bits, of 64, between hashes of near duplicates
MAX_SHIFT, MAX_MEAN, MAX_LOCAL = 16.0, 4.0, 16.0  # of 255: in brightness, on average, at any one pixel
_WORDS = 4  # two hashes that differ in three bits have at least one of four words in common


class ImageHash(NamedTuple):
    """Hashes of an image: of its pixels (`digest`), perceptual (`look`), and a thumbnail uint8 (16, 16, 3)."""

    digest: bytes
    look: int
    small: np.ndarray


def hash_image(image: Image.Image) -> ImageHash:
    """Hashes an RGB image. Each of 64 bits of `look` tells whether a pixel is brighter than its left neighbour."""
    digest = blake2b(f"{image.size}".encode() + image.tobytes(), digest_size=16).digest()
    grey = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    bits = np.packbits(grey[:, 1:] > grey[:, :-1])
    small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), np.uint8)
    return ImageHash(digest, int.from_bytes(bits.tobytes(), "big"), small)


def find_exact_duplicates(hashes: Sequence[ImageHash]) -> list[list[int]]:
    """Groups of images with equal pixels."""
    groups = defaultdict(list)
    for index, image_hash in enumerate(hashes):
        groups[image_hash.digest].append(index)
    return [group for group in groups.values() if len(group) > 1]


def find_near_duplicates(hashes: Sequence[ImageHash]) -> list[tuple[int, int]]:
    """Pairs of images that look alike without being equal: resized, recompressed, slightly brighter.

    Hashes find candidates and thumbnails decide, because scenes on a plain background have similar hashes.
    """
    if not hashes:
        return []
    looks = np.array([image_hash.look for image_hash in hashes], np.uint64)
    small = np.stack([image_hash.small for image_hash in hashes]).reshape(len(hashes), -1, 3)
    pairs: set[tuple[int, int]] = set()
    for word in range(_WORDS):
        words = (looks >> np.uint64(16 * word)) & np.uint64(0xFFFF)
        order = np.argsort(words, kind="stable")
        starts = np.flatnonzero(np.diff(words[order], prepend=np.uint64(2**20))).tolist()
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            pairs |= _find_near_within(order[start:end], looks, small)
    return sorted(pair for pair in pairs if hashes[pair[0]].digest != hashes[pair[1]].digest)


def _find_near_within(members: np.ndarray, looks: np.ndarray, small: np.ndarray) -> set[tuple[int, int]]:
    pairs = set()
    for place, reference in enumerate(members[:-1].tolist()):
        candidates = members[place + 1 :]
        candidates = candidates[np.bitwise_count(looks[candidates] ^ looks[reference]) <= MAX_BITS]
        if len(candidates) == 0:
            continue
        gaps = small[candidates].astype(np.float32) - small[reference].astype(np.float32)  # (M, 256, 3)
        shift = gaps.mean(1, keepdims=True)
        local = np.abs(gaps - shift)
        alike = (np.abs(shift).max((1, 2)) <= MAX_SHIFT) & (local.mean((1, 2)) <= MAX_MEAN)
        alike &= local.max((1, 2)) <= MAX_LOCAL
        pairs |= {(min(reference, candidate), max(reference, candidate)) for candidate in candidates[alike].tolist()}
    return pairs


TINY = 32  # shorter side of an image, in pixels
IN_PROGRESS = 512  # images that are read in parallel
_SPELLED = re.compile("<0x[0-9A-F]{2}>")  # a byte of a character that the vocabulary lacks

# Maximum share of each kind of problem with which a run trains to the end, but learns or scores the wrong thing.
# What a run skips by itself has no limit here; where a run has one, it stops, which is listed in Faults.errors.
LIMITS = {
    "damaged shard": 0.0,
    "image in two splits": 0.0,
    "nearly the same image in two splits": 0.01,
    "one image in two classes": 0.01,
    "duplicate image": 0.1,
    "near duplicate image": 0.1,
    "repeated caption": 0.1,
    "over-long caption": 0.05,
    "one caption for most images": 0.5,  # a model can ignore the images and still be right
    "unknown to the tokenizer": 0.1,
    "text in two splits": 0.0,
    "sentence in two splits": 0.02,  # of a tagged corpus, where greetings and names recur by chance
    "duplicate text": 0.1,
    "one text in two classes": 0.01,
    "over-long text": 0.05,
    "pair in two splits": 0.01,  # texts of a few words recur by chance
    "duplicate pair": 0.1,
    "pair of unlike lengths": 0.05,
    "tag that train lacks": 0.01,
    "answer that does not consist of whole words": 0.05,  # only whole words of the context can be answers
    "context in two splits": 0.0,
    "document in two splits": 0.0,
    "duplicate document": 0.1,
}
REMEDIES = {
    "unreadable image": "repair or remove these files; a run skips them, up to callbacks.bad_samples.limit",
    "invalid row": "correct or remove these rows; a run skips them, up to 1% of a file",
    "missing image": "correct these names, or set data.root; a run skips them, up to 1% of the images",
    "damaged shard": "write or fetch the shard again",
    "image in two splits": "keep it in one: scores on images that training has seen mean nothing",
    "nearly the same image in two splits": "keep both in one split",
    "one image in two classes": "keep one of the classes",
    "duplicate image": "list all captions of an image in one row or file",
    "near duplicate image": "keep one of them, or list all captions in one row",
    "repeated caption": "write separate captions for each image, or remove the repeated ones",
    "tiny image": "use larger copies: images are enlarged to data.image_size",
    "empty caption": "write one, or remove the row",
    "over-long caption": "raise data.max_len",
    "one caption for most images": "write captions that describe what differs between the images",
    "unknown to the tokenizer": (
        "these characters are lost; tokenizer.character_coverage=1.0 keeps all of train, "
        "tokenizer=bytes can encode any character"
    ),
    "characters spelled in bytes": (
        "nothing is lost, but texts take more tokens; tokenizer.character_coverage=1.0 keeps all characters of train"
    ),
    "over-long text": "raise data.max_len",
    "text in two splits": "keep it in one",
    "sentence in two splits": "keep it in one",
    "pair in two splits": "keep it in one",
    "duplicate text": "remove the copies: models memorize frequent copies",
    "duplicate pair": "remove the copies: models memorize frequent copies",
    "duplicate document": "remove the copies: models memorize frequent copies",
    "pair of unlike lengths": "check that both texts say the same; remove pairs that do not",
    "answer that does not consist of whole words": "begin and end answers at whole words of the context",
    "one text in two classes": "keep one of the classes",
    "tag that train lacks": "correct the tag, or add sentences with it to train",
    "context in two splits": "keep all questions of a context in one split",
    "answer not in its context": "copy answers from the context, letter by letter",
    "document in two splits": "keep it in one",
}


# Kind of problem by (pixels are equal, splits differ).
DUPLICATES = {
    (True, True): "image in two splits",
    (False, True): "nearly the same image in two splits",
    (True, False): "duplicate image",
    (False, False): "near duplicate image",
}


@dataclass
class Faults:
    """Messages by kind of problem, and the number of things that were checked.

    Attributes:
        errors: Errors with which training stops.
        skipped: Kinds of which training skips the samples.
        by_kind: Messages by kind.
        looked_at: Number of images, captions or documents that were checked for a kind.
    """

    errors: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    by_kind: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    looked_at: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, lines: Iterable[str], looked_at: int) -> None:
        self.looked_at[kind] = self.looked_at.get(kind, 0) + looked_at
        if lines := list(lines):
            self.by_kind[kind] += lines

    def share(self, kind: str) -> float:
        return len(self.by_kind[kind]) / max(1, self.looked_at[kind])

    @property
    def spoiling(self) -> list[str]:
        """Kinds of problems that exceed their limit."""
        return [kind for kind in self.by_kind if self.share(kind) > LIMITS.get(kind, 1.0)]


@dataclass
class CheckedImage:
    """An image that was read."""

    split: str
    name: str
    label: int | None
    size: tuple[int, int]
    hash: ImageHash


def read_images(splits: Mapping[str, Split], faults: Faults, *, limit: int | None) -> list[CheckedImage]:
    """Reads the images of all splits in parallel, with a progress bar, and records unreadable ones."""
    work = [
        (name, split, at)
        for name, split in splits.items()
        for at in range(min(len(split), limit or len(split)))
        if "image" in split.record(at)  # conversations may have none
    ]
    images: list[CheckedImage] = []
    unreadable = []
    with ThreadPoolExecutor(cores()) as pool:  # at most one block of images is in progress
        blocks = (pool.map(_read_image, work[at : at + IN_PROGRESS]) for at in range(0, len(work), IN_PROGRESS))
        for result in progress(chain.from_iterable(blocks), len(work), "images"):
            if isinstance(result, CheckedImage):
                images.append(result)
            else:
                unreadable.append(result)
    faults.add("unreadable image", unreadable, len(work))
    faults.skipped.append("unreadable image")
    return images


def _read_image(at: tuple[str, Split, int]) -> "CheckedImage | str":
    name, split, index = at
    record = split.record(index)
    try:
        image, *_ = record.images()
    except ImageError as fault:
        return f"{name}: {fault}"
    return CheckedImage(name, record.id, record.values.get("label"), image.size, hash_image(image))


def find_image_faults(
    images: Sequence[CheckedImage], faults: Faults, *, is_generated: bool = False, shorter: int = 2 * TINY
) -> None:
    """Finds tiny images, and duplicates within a split, between splits or between classes.

    Args:
        images: All images.
        faults: Extended by the problems.
        is_generated: Whether a program draws the images, so that near duplicates are expected.
        shorter: Shorter side at which the model reads them; small ones are accepted if this is small.
    """
    tiny = min(TINY, shorter // 2)
    named = [f"{first.split}: {first.name}" for first in images]
    sizes = zip(named, (first.size for first in images), strict=True)
    small = [f"{name}: {width} x {height}" for name, (width, height) in sizes if min(width, height) < tiny]
    faults.add("tiny image", small, len(images))
    kinds: dict[str, list[str]] = defaultdict(list)
    hashes = [first.hash for first in images]
    pairs = [(group[0], second, True) for group in find_exact_duplicates(hashes) for second in group[1:]]
    pairs += [(first, second, False) for first, second in ([] if is_generated else find_near_duplicates(hashes))]
    for first, second, are_equal in pairs:
        line = f"{named[first]} {'=' if are_equal else '~'} {named[second]}"
        kinds[DUPLICATES[are_equal, images[first].split != images[second].split]].append(line)
        if are_equal and images[first].label != images[second].label:
            kinds["one image in two classes"].append(line)
    for kind in (*DUPLICATES.values(), "one image in two classes"):
        faults.add(kind, kinds[kind], len(images))


def find_caption_faults(
    splits: Mapping[str, Split], field: CaptionField, faults: Faults, *, limit: int | None
) -> dict[str, float]:
    """Finds empty, too long or unencodable captions; returns the share of known tokens of each split."""
    coverage, tokenizer = {}, field.tokenizer
    for name, split in splits.items():
        read = [(record.id, *lengths) for record in split.records(limit) for lengths in field.lengths(record)]
        texts = [(image, text) for image, text, _ in read]
        ids = [tokenizer.encode(text) for _, text in texts]
        too_long = [(image, text, count) for image, text, count in read if count > field.max_len]
        cut = f"tokens, which data.max_len={field.max_len} cuts"
        long = [f"{name}: {image}: {count} {cut}: {text[:60]}" for image, text, count in too_long]
        empty = [f"{name}: {image}" for image, text in texts if not text.strip()]
        faults.add("empty caption", empty, len(empty))  # the rows of a table were counted with its empty ones
        faults.add("over-long caption", long, len(texts))
        coverage[name] = cover(name, texts, ids, tokenizer, faults)
    return coverage


def caption_line(splits: Mapping[str, Split], faults: Faults, *, limit: int | None) -> str:
    """Returns a line on the number of distinct captions; reports one that most images have."""
    records = [record for split in splits.values() for record in split.records(limit)]
    texts = [(record.id, {str(text) for text in record["references"]}) for record in records]
    counts = Counter(text for _, captions in texts for text in captions)
    caption, often = counts.most_common(1)[0]
    lines = [f"{image}: {caption[:60]}" for image, captions in texts if caption in captions]
    faults.add("one caption for most images", lines if 2 * often > len(texts) else [], len(texts))
    total = counts.total()
    return f"captions    {total:,}; {len(counts):,} distinct caption{'s' * (len(counts) > 1)}"


def cover(
    split: str, texts: Sequence[tuple[str, str]], ids: Sequence[Sequence[int]], tokenizer: Tokenizer, faults: Faults
) -> float:
    """Finds texts with characters outside the vocabulary; returns the share of tokens that are pieces of it."""
    if isinstance(tokenizer, ByteTokenizer):
        return 1.0
    tokens = {id for row in ids for id in row}
    kinds = {
        "unknown to the tokenizer": tokens & {tokenizer.unk_id},
        "characters spelled in bytes": {id for id in tokens if _SPELLED.fullmatch(tokenizer.piece(id))},
    }
    for kind, missing_ids in kinds.items():
        lines = []
        for (name, text), row in zip(texts, ids, strict=True):
            if missing := [id for id in row if id in missing_ids]:
                characters = "".join(dict.fromkeys(tokenizer.decode(missing)))
                quoted = f"{characters[:8]} in: " if "\ufffd" not in characters else ""  # unknown ones have no text
                lines.append(f"{split}: {name}: {quoted}{text[:60]}")
        faults.add(kind, lines, len(texts))
    all_missing = set().union(*kinds.values())
    return 1 - sum(id in all_missing for row in ids for id in row) / max(1, sum(map(len, ids)))


# Kind of problem by kind of a source's message, if they differ; the noun is the source's: caption, conversation, ...
SOURCE_KINDS = {
    "": "unusable entry",
    "empty caption": "empty {noun}",
    "no image": "{noun} without an image",
    "no caption": "sample without a {noun}",
    "no label": "sample without a label",
    "two splits": "image in two splits",
}
STOPPING = ("image in two splits", "unequal files")  # what a source lists only inside `collect_errors`


def find_source_faults(source: Source, samples: int, faults: Faults) -> None:
    """Records what a source skips, repeats or never mentions, by kind.

    Args:
        samples: Number of samples of all splits.
    """
    noun = getattr(source, "text", "caption")
    kinds: dict[str, list[str]] = defaultdict(list)
    for line in source.skipped:
        kind = line.kind if isinstance(line, SkipMessage) else ""
        kinds[SOURCE_KINDS.get(kind, kind).replace("{noun}", noun)].append(line)
    rows = source.rows or samples + len(source.skipped)
    for kind, lines in kinds.items():
        faults.add(kind, lines, samples + len(lines) if kind == "missing image" else rows)
    faults.skipped += [kind for kind in kinds if kind not in STOPPING]
    faults.add("repeated caption", source.repeated, rows)
    uncaptioned = [f"{path}: no {noun} names it" for path in source.find_uncaptioned_images()]
    faults.add(f"image without a {noun}", uncaptioned, samples + len(uncaptioned))
    damaged, files = source.check_archives()
    if files:
        faults.add("damaged shard", damaged, files)


def find_document_faults(splits: Mapping[str, Split], faults: Faults) -> dict[str, int]:
    """Finds empty and duplicate documents; returns the number of characters of each split."""
    first_places: dict[int, tuple[str, int]] = {}
    sizes: Counter[str] = Counter()
    for split, records in splits.items():
        for number, record in enumerate(records.records()):
            text = "".join(record["document"].lines())
            sizes[split] += len(text)
            here = f"{split}: document {number}"
            faults.add("empty document", [here] if not text.strip() else [], 1)
            first = first_places.setdefault(hash(text), (split, number))
            repeats = [f"{first[0]}: document {first[1]} = {here}"] if first != (split, number) and text.strip() else []
            crosses_splits = bool(repeats) and first[0] != split
            faults.add("document in two splits", repeats if crosses_splits else [], 1)
            faults.add("duplicate document", [] if crosses_splits else repeats, 1)
    return dict(sizes)
