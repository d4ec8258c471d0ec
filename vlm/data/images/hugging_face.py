"""The preprocessing of a Hugging Face folder: its preprocessor_config.json, read into ours or refused."""

from collections.abc import Mapping
from typing import Any

from vlm.data.images.image import Preprocess
from vlm.errors import UserError
from vlm.models.pretrained.files import KEY, OWN, read_json

FILE = "preprocessor_config.json"
RESAMPLINGS = {1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box"}  # Pillow's numbers
# Of each kind of processor, what a file that leaves it out means.
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
KINDS: dict[str, dict[str, Any]] = {"ViT": {"resample": 2, "size": 224, **HALF}}


def read_preprocess(folder: str) -> Preprocess:
    """The preprocessing of a folder.

    Raises:
        UserError: There is none, it is damaged, or it does what ours does not.
    """
    if own := (read_json(folder, OWN) or {}).get("preprocess"):
        return Preprocess.from_state(own)
    config = read_json(folder, FILE)
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
    size, resize = _size(values["size"])
    if values.get("do_center_crop", False):
        crop, _ = _size(values.get("crop_size", size))
        if crop != size:
            raise ValueError(f"it cuts {crop} pixels out of {size}")
    elif resize == "crop":
        raise ValueError("images of its are no squares")
    normalized = values.get("do_normalize", True)
    return Preprocess(
        image_size=size,
        resize=resize,
        mean=values["image_mean"] if normalized else (0.0, 0.0, 0.0),
        std=values["image_std"] if normalized else (1.0, 1.0, 1.0),
        interpolation=RESAMPLINGS.get(values["resample"], str(values["resample"])),
    )


def _size(size: Any) -> tuple[int, str]:
    """The side of a square, and which way an image comes to it."""
    if isinstance(size, Mapping):
        if size.get("shortest_edge"):
            return size["shortest_edge"], "crop"
        if size["height"] != size["width"]:
            raise ValueError(f"its images are of {size['height']} x {size['width']} pixels, which is no square")
        return size["height"], "squash"
    return size, "squash"
