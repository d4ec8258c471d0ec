"""Checks whether features of a training split can be cached, and hashes its images and their transform."""

import json
from hashlib import blake2b
from typing import Any

from vlm.data.fields import ImageField
from vlm.data.records import Split
from vlm.errors import UserError


def augment_fault(augment: Any) -> str | None:
    """Reason why features cannot be cached with an augmentation; None if its output never changes."""
    kind = type(augment)
    if not {"drawn", "OFF"} & vars(kind).keys():  # an inherited `drawn` does not cover what the class adds
        return f"data.augment may be random: {kind.__name__} does not define `drawn`, which lists what is on"
    if not augment.drawn:
        return None
    names = (part.partition("=")[0] for part in augment.drawn)
    off = " ".join(f"data.augment.{name}={json.dumps(kind.OFF[name])}" for name in names)
    return f"data.augment changes images in every epoch ({', '.join(augment.drawn)}); turn it off: {off}"


def check_split(split: Split) -> None:
    """Checks that the features of a training split can be cached.

    Raises:
        UserError: Its images differ between epochs, or changes of them cannot be detected.
    """
    if split.fresh:
        raise UserError(
            "data.cache_features: this data has new images in every epoch; fix them with data.train_samples=N"
        )
    if split.record(0).open_more:
        raise UserError("data.cache_features: not supported for several images per record; set it to false")
    if split.record(0).read_stamp is None:
        raise UserError("data.cache_features: these records have no read_stamp, which detects changed images")


def source_hash(split: Split, images: ImageField) -> str:
    """A hash of the images of a split and of their transform."""
    digest, augment = blake2b(digest_size=16), images.augment or images.preprocess
    transform = {"augment": vars(augment), "preprocess": images.preprocess.state()}
    digest.update(f"{type(augment).__name__} {json.dumps(transform, sort_keys=True, default=repr)}".encode())
    for record in split.records():
        stamp = record.read_stamp() if record.read_stamp else ""
        digest.update(f"{record.id}\0{stamp}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
