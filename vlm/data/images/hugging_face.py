"""The preprocessing of a Hugging Face folder: its preprocessor_config.json, read into ours or refused.

Newer folders have it in processor_config.json, beside that of texts.
"""

from collections.abc import Mapping
from math import nextafter
from typing import Any

from vlm.data.images.image import Preprocess
from vlm.errors import UserError
from vlm.models.pretrained.files import KEY, OWN, read_json

FILE, BESIDE_TEXT = "preprocessor_config.json", "processor_config.json"
RESAMPLINGS = {1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box"}  # Pillow's numbers
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
OPENAI = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
CROPPED = {"resample": 3, "size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224}
# Of each kind of processor, what a file that leaves it out means.
KINDS: dict[str, dict[str, Any]] = {
    "ViT": {"resample": 2, "size": 224, **HALF},
    "DeiT": {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224, **HALF},
    "CLIP": {**CROPPED, **OPENAI},
    "Bit": {**CROPPED, **OPENAI},
    "Siglip": {"resample": 3, "size": 224, **HALF},
    "Blip": {"resample": 3, "size": 384, **OPENAI},
}


def read_preprocess(folder: str) -> Preprocess:
    """The preprocessing of a folder.

    Raises:
        UserError: There is none, it is damaged, or it does what ours does not.
    """
    if own := (read_json(folder, OWN) or {}).get("preprocess"):
        return Preprocess.from_state(own)
    config = read_json(folder, FILE) or (read_json(folder, BESIDE_TEXT) or {}).get("image_processor")
    if config is None:
        raise UserError(f"{KEY}: {folder} has no {FILE}; put the one beside that the model was trained with")
    try:
        return _preprocess(config)
    except (AttributeError, KeyError, TypeError, ValueError, UserError) as fault:
        raise UserError(f"{KEY}: {FILE} in {folder} cannot be used: {fault}; choose another folder") from fault


def _preprocess(config: Mapping[str, Any]) -> Preprocess:
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "ViTImageProcessor")
    kind = name.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    if kind not in KINDS:
        raise ValueError(f"it is of a {name[:40]}; what can be read is {', '.join(KINDS)}")
    values = KINDS[kind] | {key: value for key, value in config.items() if value is not None}
    if not values.get("do_resize", True):
        raise ValueError("it does not resize images")
    if not values.get("do_rescale", True) or abs(values.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-3:
        raise ValueError("it does not scale pixels to [0, 1]")
    # A bare number is the shorter side where that is the default, else both sides.
    shorter = isinstance(KINDS[kind]["size"], Mapping)
    size, resize = _size(values["size"], "crop_down" if shorter else "squash")
    shown = size
    if values.get("do_center_crop", False):
        shown, _ = _size(values.get("crop_size", size), "squash")
        if shown > size or (resize == "squash" and (size - shown) % 2):
            raise ValueError(f"it cuts {shown} pixels out of {size}")
    elif resize == "crop_down":
        raise ValueError("images of its are no squares")
    normalized = values.get("do_normalize", True)
    return Preprocess(
        image_size=shown,
        resize=resize,
        crop=_share(shown, size),
        mean=values["image_mean"] if normalized else (0.0, 0.0, 0.0),
        std=values["image_std"] if normalized else (1.0, 1.0, 1.0),
        interpolation=RESAMPLINGS.get(values["resample"], str(values["resample"])),
    )


def _share(shown: int, size: int) -> float:
    """The share of a side that is shown, of which the side comes out again rounded down."""
    return next(share for share in (shown / size, nextafter(shown / size, 0)) if int(shown / share) == size)


def _size(size: Any, plain: str) -> tuple[int, str]:
    """The side of a square, and which way an image comes to it.

    Args:
        plain: The way of a bare number.
    """
    if isinstance(size, Mapping):
        if size.get("shortest_edge"):
            return size["shortest_edge"], "crop_down"
        if size["height"] != size["width"]:
            raise ValueError(f"its images are of {size['height']} x {size['width']} pixels, which is no square")
        return size["height"], "squash"
    return size, plain
