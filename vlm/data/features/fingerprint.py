"""Checks whether features of a training split can be kept, and the hash of its images and their transform."""

import json
from hashlib import blake2b
from typing import Any

from vlm.data.fields import ImageField
from vlm.data.records import Split
from vlm.errors import UserError


def augment_fault(augment: Any) -> str | None:
    """Why the features of what an augmentation gives cannot be kept; None where it always gives the same."""
    kind = type(augment)
    if not {"drawn", "OFF"} & vars(kind).keys():  # what it inherits does not know what it adds
        return f"data.augment may be random, since {kind.__name__} has no `drawn` of its own that says what of it is on"
    if not augment.drawn:
        return None
    names = (part.partition("=")[0] for part in augment.drawn)
    off = " ".join(f"data.augment.{name}={json.dumps(kind.OFF[name])}" for name in names)
    return f"data.augment makes other pixels in every epoch ({', '.join(augment.drawn)}); turn that off: {off}"


def check_split(split: Split) -> None:
    """Refuses a training split whose features cannot be kept.

    Raises:
        UserError: It has other images in every epoch, or does not show when one has changed.
    """
    if split.fresh:
        raise UserError(
            "data.cache_features: these data have new images in every epoch; data.train_samples=N keeps to the same"
        )
    if split.record(0).open_more:
        raise UserError("data.cache_features: records of several images are not kept; set it to false")
    if split.record(0).read_stamp is None:
        raise UserError("data.cache_features: these records have no read_stamp, which shows that an image changed")


def fingerprint(split: Split, images: ImageField) -> str:
    """A hash of the images of a split and of what is done to them."""
    digest, augment = blake2b(digest_size=16), images.augment or images.preprocess
    transform = {"augment": vars(augment), "preprocess": images.preprocess.state()}
    digest.update(f"{type(augment).__name__} {json.dumps(transform, sort_keys=True, default=repr)}".encode())
    for record in split.records():
        stamp = record.read_stamp() if record.read_stamp else ""
        digest.update(f"{record.id}\0{stamp}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
