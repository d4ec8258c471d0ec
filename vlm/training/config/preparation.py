"""Preprocessing of images as a pretrained encoder was trained with, wherever a config leaves it open."""

from typing import Any

from vlm.config.target import arguments, find
from vlm.data.images.image import INTERPOLATIONS

SHOWN = ("resize", "interpolation", "crop")  # training shows of an image what evaluation does


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """A config whose preprocessing is filled in from its encoder; values that it states stay."""
    encoder = config["model"].get("encoder") or {}
    prepares = getattr(find(encoder["_target_"]), "prepares", None) if encoder else None
    expected = prepares(**encoder) if prepares else {}
    if expected.get("interpolation") not in INTERPOLATIONS:  # timm has two more, which few models were trained with
        expected.pop("interpolation", None)
    fields = {name: _filled(node, expected) for name, node in config["task"]["fields"].items()}
    return config | {"data": _filled(config["data"], expected), "task": config["task"] | {"fields": fields}}


def _filled(node: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    preprocess, augment = node.get("preprocess"), node.get("augment")
    if preprocess is None:
        return node
    preprocess = _with(preprocess, expected)
    shown = {name: preprocess[name] for name in SHOWN if preprocess.get(name) is not None}
    return node | {"preprocess": preprocess} | ({"augment": _with(augment, shown)} if augment else {})


def _with(node: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A node with values for those of its arguments that it leaves open."""
    takes = arguments(find(node["_target_"]))
    open_ = {name: value for name, value in values.items() if name in takes and node.get(name) is None}
    return node | {name: value for name, value in open_.items() if value is not None}
