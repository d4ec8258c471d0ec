"""Fills in the preprocessing that a pretrained encoder was trained with."""

from copy import deepcopy
from typing import Any

from vlm.config.target import arguments, find
from vlm.config.tree import Config, escape, origin, put, resolve, select
from vlm.data.images.resize import INTERPOLATIONS

SHOWN = ("resize", "interpolation", "crop")  # options that training shares with evaluation


def prepared(config: dict[str, Any]) -> Config:
    """The config with unset preprocessing options taken from its encoder."""
    encoder = config["model"].get("encoder") or {}
    encoder = encoder.get("backbone") or encoder
    prepares = getattr(find(encoder["_target_"]), "prepares", None) if encoder else None
    expected = prepares(**encoder) if prepares else {}
    if expected.get("interpolation") not in INTERPOLATIONS:  # timm has two more, which few models were trained with
        expected.pop("interpolation", None)
    whole = config if isinstance(config, Config) else resolve(escape(config))
    places = ["data", *(f"task.fields.{name}" for name in config["task"]["fields"])]
    places = [place for place in places if select(config, f"{place}.preprocess")]
    whole = _filled(whole, {f"{place}.preprocess": expected for place in places})
    nodes = {place: select(whole, f"{place}.preprocess") for place in places if select(whole, f"{place}.augment")}
    shown = {f"{place}.augment": {name: node.get(name) for name in SHOWN} for place, node in nodes.items()}
    whole = _filled(whole, shown)
    whole.typed = getattr(config, "typed", ())
    return whole


def _filled(config: Config, values: dict[str, dict[str, Any]]) -> Config:
    """The config with values for unset arguments of some nodes."""
    tree = deepcopy(config.tree)
    for place, given in values.items():
        node = select(config, place)
        takes = arguments(find(node["_target_"]))
        for name, value in given.items():
            if name in takes and node.get(name) is None and value is not None:
                put(tree, origin(tree, f"{place}.{name}"), escape(value))
    return resolve(tree)
