"""The model that a config.json describes, as checkpoints specify it, and the task that it is for."""

from collections.abc import Mapping
from typing import Any

from vlm.errors import UserError
from vlm.models.pretrained.files import KEY
from vlm.models.pretrained.names import KINDS, not_ours, sizes_stored

JOINED = "vision-encoder-decoder"
NO_ARGUMENTS = ("stem", "positions")  # what a ViT and a decoder of ours have by default

Spec = dict[str, Any]


def specify(config: Mapping[str, Any], folder: str) -> tuple[str, Spec]:
    """The task and the specification of a folder's model.

    Raises:
        UserError: It is for no task, or our layers do not compute it.
    """
    kind, architectures = config.get("model_type"), config.get("architectures") or [""]
    if kind == JOINED:
        encoder = _part(config.get("encoder"), "vit", folder)
        decoder = _part(config.get("decoder"), "gpt2", folder)
        decoder["args"]["context_dim"] = encoder["args"]["dim"]
        return "captioning", {"name": "VisionLanguageModel", "args": {"encoder": encoder, "decoder": decoder}}
    if kind == "gpt2":
        return "language_modeling", _part(config, "gpt2", folder)
    if kind == "vit" and architectures[0] == "ViTForImageClassification":
        args = {"encoder": _part(config, "vit", folder), "num_classes": len(class_names(config)), "pool": "class"}
        return "classification", {"name": "Classifier", "args": args}
    raise UserError(
        f"{KEY}: {folder} holds a {str(architectures[0] or kind)[:60]}; what can be used is VisionEncoderDecoderModel "
        "of ViT and GPT-2, GPT2LMHeadModel and ViTForImageClassification"
    )


def class_names(config: Mapping[str, Any]) -> list[str]:
    """The names of a classifier's classes, in the order of its outputs."""
    labels = config.get("id2label") or {}
    if sorted(labels, key=int) != [str(n) for n in range(len(labels))]:
        raise ValueError("id2label does not name the classes from 0 on")
    return [str(labels[str(n)]) for n in range(len(labels))]


def _part(config: Any, kind: str, folder: str) -> Spec:
    held = config.get("model_type") if isinstance(config, Mapping) else None
    if held != kind:
        raise UserError(
            f"{KEY}: {folder} has a part of type {str(held)[:40]!r} where {kind} can be read; choose another"
        )
    if faults := list(not_ours(config)):
        raise UserError(f"{KEY}: {folder} has {', '.join(faults)}, which our {KINDS[kind].__name__} does not do")
    sizes = {name: value for name, value in sizes_stored(config).items() if name not in NO_ARGUMENTS}
    sizes["mlp_ratio"] = _ratio(round(sizes["mlp_ratio"] * sizes["dim"]), sizes["dim"])
    return {"name": KINDS[kind].__name__, "args": sizes}


def _ratio(hidden: int, dim: int) -> float:
    """The ratio that a block makes the hidden width of, rounding down."""
    return hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim
