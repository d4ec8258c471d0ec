"""Whether features of a training split can be kept, and what tells them from all others: its images and transform."""

import json
from hashlib import blake2b
from typing import Any

from vlm.errors import UserError


def augment_fault(augment: Any) -> str | None:
    """Why the features of what an augmentation gives cannot be kept; None where it always gives the same."""
    kind = type(augment)
    if not {"drawn", "OFF"} & vars(kind).keys():  # what it inherits does not know what it adds
        return f"data.augment may be random, since {kind.__name__} has no `drawn` of its own that says what of it is on"
    if not augment.drawn:
        return None
    return f"data.augment makes other pixels in every epoch ({', '.join(augment.drawn)}); turn that off"


def check_split(split: Any) -> None:
    """Refuses a training split whose features cannot be kept.

    Raises:
        UserError: It has other images in every epoch, or does not tell when one has changed.
    """
    if split.fresh:
        raise UserError(
            "data.cache_features: these data have new images in every epoch; data.train_samples=N keeps to the same"
        )
    if signature_of(split, 0) is None:
        raise UserError(
            f"data.cache_features: {type(split).__name__} has no signature(index), which tells that an image changed"
        )


def signature_of(split: Any, index: int) -> str | None:
    """What changes where an image does, without its being read; None where a split cannot tell."""
    told = getattr(split, "signature", None)
    return told(index) if told else None


def fingerprint(data: Any) -> str:
    """Tells the training images and what is done to them from all others.

    Args:
        data: Captioned images, or images in classes.
    """
    split, digest = data.split("train"), blake2b(digest_size=16)
    transform = {"augment": vars(data.augment), "preprocess": data.preprocess.state()}
    digest.update(f"{type(data.augment).__name__} {json.dumps(transform, sort_keys=True, default=repr)}".encode())
    for index in range(len(split)):
        digest.update(f"{split.sample_id(0, index)}\0{signature_of(split, index)}\n".encode())
    return digest.hexdigest()
