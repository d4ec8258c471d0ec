"""Reads the preprocessing of a Hugging Face folder."""

from collections.abc import Mapping
from math import nextafter
from typing import Any

from vlm.data.images.image import Preprocess
from vlm.data.images.resize import INTERPOLATIONS, MAX_IMAGE_SIZE, MIN_CROP
from vlm.errors import UserError
from vlm.models.pretrained.fields import REQUIRED, Fields, choice, flag, integer, number, numbers
from vlm.models.pretrained.folder import CONFIG, Folder
from vlm.models.timm_encoder import RESIZES
from vlm.nn.image_size import plain, sides

# The second, newer file also describes texts.
FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
RESAMPLINGS = {1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box"}  # Pillow's numbers
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
OPENAI = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
CROPPED = {"resample": 3, "size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224}
FITTED = {"resample": 1, "size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}, **HALF}
# Defaults of each kind of processor, for keys that a file omits.
KINDS: dict[str, dict[str, Any]] = {
    "ViT": {"resample": 2, "size": 224, **HALF},
    "DeiT": {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224, **HALF},
    "CLIP": {**CROPPED, **OPENAI},
    "Bit": {**CROPPED, **OPENAI},
    "Llava": {**CROPPED, **OPENAI},
    "Siglip": {"resample": 3, "size": 224, **HALF},
    "Blip": {"resample": 3, "size": 384, **OPENAI},
    "Idefics3": FITTED,
    "SmolVLM": FITTED,
}


def read_preprocess(folder: Folder) -> Preprocess:
    """The preprocessing of a folder.

    Raises:
        UserError: It is missing, damaged or not supported.
    """
    if stored := folder.vlm_metadata("preprocess"):
        return Preprocess.from_state(stored)
    if (model := folder.read_json(CONFIG)) is not None and "pretrained_cfg" in model:
        return _read_timm(model.part("pretrained_cfg"))
    config, processor = folder.read_json(FILE), folder.read_json(PROCESSOR_FILE)
    if config is None and processor is not None and "image_processor" in processor:
        config = processor.part("image_processor")
    if config is None:
        raise UserError(f"{folder} has no {FILE}; add the one that the model was trained with")
    try:
        return _read_processor(config)
    except ValueError as fault:
        raise UserError(f"{config.file}: cannot be used: {fault}; choose another folder") from fault


def _read_timm(config: Fields) -> Preprocess:
    """Reads the preprocessing of timm's own evaluation."""
    _, height, width = map(int, config.read(numbers("input_size", [3, 224, 224], 3, 1, MAX_IMAGE_SIZE)))
    options: dict[str, Any] = {
        name: config.read(numbers(name, default, 3, 1e-6 if name == "std" else -100, 1e3))
        for name, default in (("mean", IMAGENET["image_mean"]), ("std", IMAGENET["image_std"]))
    }
    options["interpolation"] = config.read(choice("interpolation", "bicubic", {name: name for name in INTERPOLATIONS}))
    options["resize"] = config.read(choice("crop_mode", "center", RESIZES))
    return Preprocess(image_size=(height, width), crop=config.read(number("crop_pct", 0.875, MIN_CROP)), **options)


def _read_processor(config: Fields) -> Preprocess:
    stated = config.values
    name = str(stated.get("image_processor_type") or stated.get("feature_extractor_type") or "ViTImageProcessor")
    kind = name.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    if kind not in KINDS:
        raise ValueError(f"{name[:40]} is not supported; supported are {', '.join(KINDS)}")
    values = Fields({**KINDS[kind], **{k: v for k, v in stated.items() if v is not None}}, config.file, config.within)
    if not values.read(flag("do_resize", True)):
        raise ValueError("it does not resize images")
    rescale = values.read(number("rescale_factor", 1 / 255)) * 255
    if not values.read(flag("do_rescale", True)) or abs(rescale - 1) > 1e-3:
        raise ValueError("it does not scale pixels to [0, 1]")
    if kind == "Llava" and values.read(flag("do_pad", False)):
        raise ValueError("it pads images to squares")
    if KINDS[kind] is FITTED:  # resized to a longest edge, then to the squares that the model reads
        longest, tile = (
            values.part(name).read(integer("longest_edge", REQUIRED, high=MAX_IMAGE_SIZE))
            for name in ("size", "max_image_size")
        )
        tiles = values.read(flag("do_image_splitting", True))
        fitting = {"image_size": tile, "resize": "squash", "longest_edge": longest, "tiles": tiles}
    else:
        fitting = _read_sizes(values, KINDS[kind])
    normalized = values.read(flag("do_normalize", True))
    mean = values.read(numbers("image_mean", None, 3, -100, 100)) if normalized else (0.0, 0.0, 0.0)
    std = values.read(numbers("image_std", None, 3, 1e-6, 1e3)) if normalized else (1.0, 1.0, 1.0)
    interpolation = values.read(choice("resample", None, RESAMPLINGS))
    try:
        return Preprocess(**fitting, mean=mean, std=std, interpolation=interpolation)
    except UserError as fault:
        raise ValueError(str(fault)) from fault


def _read_sizes(values: Fields, kind: Mapping[str, Any]) -> dict[str, Any]:
    # A plain number is the shorter side if that is the processor's default, else both sides.
    shorter = isinstance(kind["size"], Mapping)
    size, resize = _read_size(values, "size", "crop_down" if shorter else "squash")
    cropped = size
    if values.read(flag("do_center_crop", False)):
        cropped, _ = _read_size(values, "crop_size" if "crop_size" in values else "size", "squash")
        pairs = [*zip(cropped, size, strict=True)]
        if any(crop > side or (resize == "squash" and (side - crop) % 2) for crop, side in pairs):
            raise ValueError(f"it crops {plain(cropped)} pixels out of {plain(size)}")
        if resize == "crop_down" and cropped[0] != cropped[1]:
            raise ValueError(f"it crops {plain(cropped)} pixels, which are not square, without stretching the image")
    elif resize == "crop_down":
        raise ValueError("its images are not square")
    pairs = [*zip(cropped, size, strict=True)]
    for ratio in (crop_side / side for crop_side, side in pairs):
        for share in (ratio, nextafter(ratio, 0)):  # rounded so that both sides are restored exactly
            if all(int(crop_side / share) == side for crop_side, side in pairs):
                return {"image_size": cropped, "resize": resize, "crop": share}
    raise ValueError(f"it crops {plain(cropped)} pixels out of {plain(size)}")


def _read_size(values: Fields, name: str, default_resize: str) -> tuple[tuple[int, int], str]:
    """Height and width, and how images are resized to them.

    Args:
        default_resize: The resizing for a plain number.
    """
    if not isinstance(values.values[name], Mapping):
        return sides(values.read(integer(name, high=MAX_IMAGE_SIZE))), default_resize
    size = values.part(name)
    if "shortest_edge" in size:
        return sides(size.read(integer("shortest_edge", high=MAX_IMAGE_SIZE))), "crop_down"
    height, width = (size.read(integer(side, REQUIRED, high=MAX_IMAGE_SIZE)) for side in ("height", "width"))
    return (height, width), "squash"
