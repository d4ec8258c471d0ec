"""A Hugging Face folder as a checkpoint of ours: model, tokenizer, preprocessing, special ids, decoding defaults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vlm.checkpoint.decoding_defaults import decoding_defaults
from vlm.checkpoint.names import FORMAT
from vlm.checkpoint.rebuild import rebuild
from vlm.checkpoint.verify import check_sizes
from vlm.data.images.hugging_face import read_preprocess
from vlm.data.images.image import Preprocess
from vlm.data.text.hugging_face import read_tokenizer
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError
from vlm.models.pretrained.files import KEY, read_config
from vlm.models.pretrained.generation import read_generation, special_ids
from vlm.models.pretrained.load import hugging_face_state
from vlm.models.pretrained.specification import class_names, specify

CONFIG = "config.json"


def is_folder(path: Path) -> bool:
    """True for a folder of Hugging Face."""
    return path.is_dir() and (path / CONFIG).exists()


def from_folder(folder: str) -> dict[str, Any]:
    """The checkpoint that a folder amounts to; nothing of it is executed, nothing is fetched.

    Raises:
        UserError: The folder is damaged, its parts do not fit together, or our models do not compute its own.
    """
    try:
        return _checkpoint(folder)
    except UserError as fault:
        first, *others = str(fault).replace(f"{KEY}: ", "").split("\n")
        remedy = [line for line in others if line.startswith(" ")]
        more = f" ({len(others)} more faults)" if others and not remedy else ""
        raise UserError("\n".join([first + more, *remedy])) from fault
    except Exception as fault:  # a config may hold anything, and break a constructor in any way
        reason = (str(fault).strip().splitlines() or [""])[0][:200]
        raise UserError(
            f"{folder}: {CONFIG} describes no model of ours ({type(fault).__name__}: {reason}); choose another folder"
        ) from fault


def _checkpoint(folder: str) -> dict[str, Any]:
    config = read_config(folder)
    task, spec = specify(config, folder)
    about = {"task": task, "model": spec, "scores": {}, "origin": _origin(config)}
    if task == "classification":
        about["classes"] = class_names(config)
    if task in ("captioning", "classification"):
        about["preprocess"] = _fitting_preprocess(folder, spec).state()
    if task in ("captioning", "language_modeling"):
        generation = read_generation(folder, config)
        about["decoding"] = decoding_defaults(generation, folder, prompted=task == "language_modeling")
        about["tokenizer"] = _fitting_tokenizer(folder, spec, generation).state()
    if task == "captioning":
        about["max_tokens"] = spec["args"]["decoder"]["args"]["max_len"]
    check_sizes(about)
    with torch.device("meta"):  # nothing is allocated, however large the folder says that it is
        model = rebuild(spec)
    state, _ = hugging_face_state(model, folder)
    if lacking := sorted(model.state_dict().keys() - state.keys()):
        raise UserError(f"{KEY}: {folder} has no weights for {', '.join(lacking[:3])}; fetch it again")
    weights = {f"model.{name}": tensor.float().contiguous() for name, tensor in state.items()}
    return {"format": FORMAT, "vlm": about, "state_dict": weights, "global_step": 0, "epoch": -1}


def _origin(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or [config["model_type"]])[0])[:100]


def _fitting_preprocess(folder: str, spec: Mapping[str, Any]) -> Preprocess:
    preprocess, size = read_preprocess(folder), spec["args"]["encoder"]["args"]["image_size"]
    if preprocess.image_size != size:
        raise UserError(
            f"{KEY}: {folder} makes images of {preprocess.image_size} pixels, its model reads {size}; "
            "use the preprocessor_config.json that it was trained with"
        )
    return preprocess


def _fitting_tokenizer(folder: str, spec: Mapping[str, Any], generation: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer, whose ids must be those of the weights."""
    size = (spec["args"].get("decoder") or spec)["args"]["vocab_size"]
    tokenizer = read_tokenizer(folder, special_ids(generation, folder))
    if tokenizer.vocab_size != size:
        raise UserError(
            f"{KEY}: {folder} has a tokenizer of {tokenizer.vocab_size:,} tokens, its weights are of {size:,}; "
            "use the tokenizer that they were trained with"
        )
    return tokenizer
