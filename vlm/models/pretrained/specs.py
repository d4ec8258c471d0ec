"""Models of ours as checkpoints specify them, of the parts that a folder describes."""

from collections.abc import Callable, Mapping
from typing import Any

Spec = dict[str, Any]


def part_of(name: str, **args: Any) -> Spec:
    """The specification of a class with its arguments."""
    return {"name": name, "args": args}


def captioner(config: Mapping[str, Any], specs: Mapping[str, Spec]) -> Spec:
    """An encoder of images with a decoder that attends to its states, unless it takes them as a prefix."""
    encoder, decoder = specs["encoder"], specs["decoder"]
    if "prefix" not in decoder["args"]:
        decoder["args"]["context_dim"] = encoder["args"]["dim"]
    return part_of("VisionLanguageModel", encoder=encoder, decoder=decoder)


def classifier(pool: str) -> Callable[[Mapping[str, Any], Mapping[str, Spec]], Spec]:
    """A classifier of images by the states that its head reads."""

    def build(config: Mapping[str, Any], specs: Mapping[str, Spec]) -> Spec:
        return part_of("Classifier", encoder=specs["encoder"], num_classes=len(class_names(config)), pool=pool)

    return build


def class_names(config: Mapping[str, Any]) -> list[str]:
    """The names of a classifier's classes, in the order of its outputs.

    Raises:
        ValueError: They are not numbered from 0 on.
    """
    labels = config.get("id2label") or {str(n): f"LABEL_{n}" for n in range(int(config.get("num_labels", 2)))}
    if sorted(labels, key=int) != [str(n) for n in range(len(labels))]:
        raise ValueError("id2label does not name the classes from 0 on")
    return [str(labels[str(n)]) for n in range(len(labels))]
