"""A Hugging Face folder as a checkpoint of ours: model, tokenizer, preprocessing, special ids, decoding defaults.

Each kind of folder has a module in `vlm.models.pretrained.architectures`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from vlm.checkpoint.decoding_defaults import decoding_defaults
from vlm.checkpoint.rebuild import NoDraws, SizeLimit, rebuild
from vlm.checkpoint.verify import check_sizes
from vlm.config.names import FORMAT
from vlm.data.images.hugging_face import read_preprocess
from vlm.data.images.image import Preprocess
from vlm.data.text.hugging_face import folder_tokenizer
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError
from vlm.models.pretrained.files import KEY, read_config, read_tensors
from vlm.models.pretrained.load import hugging_face_state
from vlm.models.pretrained.specification import Specified, origin, specify
from vlm.models.pretrained.specs import Spec, class_names

CONFIG = "config.json"
NAMED = ("classification", "text_classification", "tagging")  # tasks with classes
WINDOW, STRIDE, LONGEST = 384, 128, 30  # tokens of a window, its step and the longest answer, where no file states them
Read = TypeVar("Read")


def is_folder(path: Path) -> bool:
    """True for a folder of Hugging Face."""
    return path.is_dir() and (path / CONFIG).exists()


def from_folder(folder: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The checkpoint that a folder amounts to; nothing of it is executed, nothing is fetched.

    Args:
        dtype: Of its weights, whatever they are stored in.
    Raises:
        UserError: The folder is damaged, its parts do not fit together, our models do not compute its own, or it holds
            an encoder without a head.
    """
    return _in_lines(folder, lambda place: _checkpoint(place, dtype))


def describe_folder(folder: str) -> tuple[Specified, dict[str, Any]]:
    """A folder's model, and what a checkpoint holds beside its weights; those are not read.

    Raises:
        UserError: As `from_folder`, but for an encoder without a head.
    """
    return _in_lines(folder, _described)


def _in_lines(folder: str, read: Callable[[str], Read]) -> Read:
    """Reads a folder, whose faults take a line each without the key of the config."""
    try:
        return read(folder)
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


def _checkpoint(folder: str, dtype: torch.dtype) -> dict[str, Any]:
    specified, about = _described(folder)
    if specified.model is None:
        known = ", ".join(specified.architecture.models) or "in a captioner"
        raise UserError(
            f"{folder} holds a {about['origin']}, which has no head for a task of ours ({known} would); train from it: "
            f"python train.py model=pretrained model.path={folder} task=TASK"
        )
    stored = read_tensors(folder, mapped=True)
    with SizeLimit(stored), NoDraws():
        model = rebuild(specified.model)
    state, _ = hugging_face_state(model, folder, stored)
    if lacking := sorted(model.state_dict().keys() - state.keys()):
        raise UserError(f"{KEY}: {folder} has no weights for {', '.join(lacking[:3])}; fetch it again")
    del stored  # a part of the file leaves the memory when its last tensor has been copied
    weights = {f"model.{name}": state.pop(name).to(dtype, copy=True) for name in list(state)}
    return {"format": FORMAT, "vlm": about, "state_dict": weights, "global_step": 0, "epoch": -1}


def _described(folder: str) -> tuple[Specified, dict[str, Any]]:
    config = read_config(folder)
    specified = specify(config, folder)
    about: dict[str, Any] = {"task": specified.task, "scores": {}, "origin": origin(config)}
    *_, texts = specified.parts.values()  # the decoder, or all that there is
    if any("image_size" in part["args"] for part in specified.parts.values()):
        preprocess = read_preprocess(folder)
        specified = specify(config, folder, image_size=preprocess.image_size)
        _check_images(folder, preprocess, specified.parts["encoder"])
        about["preprocess"] = preprocess.state()
    about["model"] = specified.model
    if "vocab_size" in texts["args"]:
        tokenizer = _fitting_tokenizer(folder, texts)
        about["tokenizer"] = tokenizer.state()
        about["max_len" if texts is specified.parts.get("encoder") else "max_tokens"] = texts["args"]["max_len"]
    if "decoder" in specified.parts:
        generation = specified.architecture.generation(folder, config)
        if [generation.get("forced_bos_token_id")] == tokenizer.begin():  # of an export of ours; the language says it
            del generation["forced_bos_token_id"]
        about["decoding"] = decoding_defaults(generation, folder, prompted=specified.task == "language_modeling")
    if specified.task in NAMED:
        about["classes"] = class_names(config)
    if specified.task == "text_classification":
        about["pairs"] = None  # no file says
    if specified.task == "span_answering":
        window = min(WINDOW, about["max_len"])
        about |= {"max_len": window, "stride": min(STRIDE, window // 2), "longest": LONGEST, "abstains": False}
    check_sizes(about)
    return specified, about


def _check_images(folder: str, preprocess: Preprocess, encoder: Spec) -> None:
    if preprocess.image_size != (size := encoder["args"]["image_size"]):
        raise UserError(
            f"{KEY}: {folder} makes images of {preprocess.image_size} pixels, its model reads {size}; "
            "use the preprocessor_config.json that it was trained with"
        )


def _fitting_tokenizer(folder: str, texts: Spec) -> Tokenizer:
    """The tokenizer, whose ids must be those of the weights."""
    size, tokenizer = texts["args"]["vocab_size"], folder_tokenizer(folder)
    if tokenizer.vocab_size != size:
        raise UserError(
            f"{KEY}: {folder} has a tokenizer of {tokenizer.vocab_size:,} tokens, its weights are of {size:,}; "
            "use the tokenizer that they were trained with"
        )
    return tokenizer
