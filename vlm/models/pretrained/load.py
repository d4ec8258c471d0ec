"""Starting from a local folder of Hugging Face: `config.json` and safetensors of GPT-2, ViT, or the two joined.

What the folder describes must be what was built; every shape is checked before anything is copied, and what is left
over on either side is named. Nothing is fetched and no pickle is read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.classifier import Classifier
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.pretrained.files import read_config, read_tensors
from vlm.models.pretrained.names import (
    KINDS,
    STEMS,
    Sources,
    fold_projection,
    gpt2_sources,
    not_ours,
    sizes_built,
    sizes_stored,
    vit_sources,
)
from vlm.models.pretrained.report import grouped
from vlm.models.vit import ViT

JOINED = "vision-encoder-decoder"
SIZES = ("dim", "num_heads", "mlp_ratio")  # that a config says once, under model.size
SHOWN = 20  # faults, at most
# The remedy for a value that other parts of the config depend on.
REMEDIES = {
    "image_size": "set data.image_size={} (its positions are of another grid)",
    "vocab_size": "choose the tokenizer it was trained with, of {} tokens",
    "max_len": "set data.max_len={} or less",
    "stem": "choose model/encoder=vit",
}


@dataclass(frozen=True)
class _Part:
    """A stack, and what of the folder describes it.

    Args:
        ours: Prefix of its names in the model: "", "encoder." or "decoder.".
        theirs: Prefix of its names in the folder.
        config: Its part of config.json.
    """

    stack: ViT | Decoder
    ours: str
    theirs: str
    config: dict[str, Any]

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """Yields (argument, as built, as stored) wherever they differ."""
        built = sizes_built(self.stack)
        for name, value in sizes_stored(self.config).items():
            # The first positions of more are all that a shorter text needs.
            fits = built[name] <= value if name == "max_len" else built.get(name, value) == value
            if not fits:
                yield name, built[name], value

    def sources(self, stored: Mapping[str, Tensor]) -> Sources:
        stem = self.theirs + STEMS[self.config["model_type"]]
        theirs = stem if any(name.startswith(stem) for name in stored) else self.theirs
        if isinstance(self.stack, ViT):
            return vit_sources(self.stack, self.ours, theirs)
        return gpt2_sources(self.stack, self.ours, theirs, stored)


def load_hugging_face(model: nn.Module, folder: str) -> list[str]:
    """Copies the weights of a local Hugging Face folder into a model that was built to its sizes.

    Args:
        model: A ViT, a Decoder, a Classifier with a ViT, or a VisionLanguageModel; what the folder has nothing for
            stays as it is.
        folder: Holds config.json and model.safetensors (or its shards) of a GPT2Model or GPT2LMHeadModel, a ViTModel or
            ViTForImageClassification, or a VisionEncoderDecoderModel of the two.
    Returns:
        Lines that say what was taken, and all that was left over on either side.
    Raises:
        UserError: The folder cannot be read, or is not of the model that was built; with a line for each fault.
    """
    tensors, lines = hugging_face_state(model, folder)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
    return lines


def hugging_face_state(model: nn.Module, folder: str) -> tuple[dict[str, Tensor], list[str]]:
    """The weights that `load_hugging_face` copies, by our names, and its lines; the model may hold none, on "meta".

    Raises:
        UserError: As `load_hugging_face`.
    """
    parts = _parts(model, read_config(folder), folder)
    _refuse(_config_faults(parts, folder))
    stored = read_tensors(folder)
    sources: Sources = {}
    for part in parts:
        sources |= part.sources(stored)
    if len(parts) == 2 and any(name.startswith("enc_to_dec_proj.") for name in stored):
        sources = fold_projection(sources, "enc_to_dec_proj")
    sources |= _head_sources(model, stored)
    state = model.state_dict()
    tensors, faults = _make(sources, stored, state, folder)
    _refuse(faults)
    return tensors, _report(sources, stored, state, folder)


def _refuse(faults: list[str]) -> None:
    lines = [f"model.init_from: {fault}" for fault in faults[:SHOWN]]
    if len(faults) > SHOWN:
        lines.append(f"model.init_from: {len(faults) - SHOWN} more")
    if lines:
        raise UserError("\n".join(lines))


def _parts(model: nn.Module, config: dict[str, Any], folder: str) -> list[_Part]:
    """The parts of the model that the folder describes.

    Raises:
        UserError: The model has no such part.
    """
    if config.get("model_type") not in (*KINDS, JOINED):
        raise UserError(
            f"model.init_from: {folder} holds a model of type {config.get('model_type')!r}; what can be read is "
            f"{', '.join(KINDS)} and {JOINED}"
        )
    if config["model_type"] != JOINED:
        return [_part(model, config, "", folder)]
    if not isinstance(model, VisionLanguageModel):
        raise UserError(
            f"model.init_from: {folder} holds an encoder with a decoder, the model is a {type(model).__name__}; "
            "use it for a model that has both"
        )
    parts = []
    for name, kind in (("encoder", "vit"), ("decoder", "gpt2")):
        inner = config.get(name)
        model_type = inner.get("model_type") if isinstance(inner, dict) else None
        if model_type != kind:
            raise UserError(
                f"model.init_from: {folder} has an {name} of type {model_type!r}; what can be read is {kind}"
            )
        parts.append(_part(model, inner, f"{name}.", folder))  # type: ignore[arg-type]
    return parts


def _part(model: nn.Module, config: dict[str, Any], theirs: str, folder: str) -> _Part:
    kind = KINDS[config["model_type"]]
    name = "encoder" if kind is ViT else "decoder"
    stack, ours = (model, "") if isinstance(model, kind) else (getattr(model, name, None), f"{name}.")
    if not isinstance(stack, kind):
        has = f"its {name} is a {type(stack).__name__}" if stack is not None else f"that has no {name}"
        raise UserError(
            f"model.init_from: {folder} holds a {config['model_type']} for a {kind.__name__}, the model is a "
            f"{type(model).__name__}, {has}; choose another folder"
        )
    return _Part(stack, ours, theirs, config)


def _config_faults(parts: list[_Part], folder: str) -> list[str]:
    faults = [
        f"{folder} has {fault}, which our {type(part.stack).__name__} does not do; choose another folder"
        for part in parts
        for fault in not_ours(part.config)
    ]
    try:
        differences = [(part, *difference) for part in parts for difference in part.differences()]
    except (TypeError, ZeroDivisionError) as fault:
        raise UserError(
            f"model.init_from: config.json in {folder} has a value that is no size ({fault}); restore the file"
        ) from fault
    for part, name, built, value in differences:
        remedy = _remedy(part, name, value, encoder=sizes_stored(parts[0].config).get(name))
        faults.append(f"{part.ours}{name} is {_as_text(built)}, {folder} has {_as_text(value)}; {remedy}")
    return faults


def _remedy(part: _Part, name: str, value: Any, encoder: Any) -> str:
    """The change to the config that mends a fault.

    Args:
        encoder: The encoder's value where the folder has an encoder: sizes are the decoder's where the two differ.
    """
    if name in REMEDIES:
        return REMEDIES[name].format(_as_text(value))
    if name == "positions":
        decodes = isinstance(part.stack, Decoder)
        return "choose model/position=learned" if decodes else f"take model.{part.ours}positions away"
    if name == "depth":
        return f"set model.size.{part.ours.replace('.', '_')}depth={_as_text(value)}"
    if name not in SIZES:
        return f"set model.{part.ours}{name}={_as_text(value)}"
    if part.theirs == "encoder.":
        return f"set model.encoder.{name}={_as_text(value)}"
    apart = f" and model.encoder.{name}={_as_text(encoder)}" if encoder != value else ""
    return f"set model.size.{name}={_as_text(value)}{apart}"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _head_sources(model: nn.Module, stored: Mapping[str, Tensor]) -> Sources:
    """A classifier's head, where ours reads the class token as theirs does and has as many classes."""
    weight = stored.get("classifier.weight")
    if not isinstance(model, Classifier) or model.pool != "class" or weight is None:
        return {}
    if weight.shape[:1] != (model.head.out_features,):
        return {}
    return {f"head.{kind}": ((f"classifier.{kind}",), lambda tensor: tensor) for kind in ("weight", "bias")}


def _make(
    sources: Sources, stored: Mapping[str, Tensor], state: Mapping[str, Tensor], folder: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Our tensors made of theirs, and all that is wrong with them."""
    tensors, faults = {}, []
    for name, (names, make) in sources.items():
        unfit = list(_unfit(name, names, stored, folder))
        faults += unfit
        if unfit:
            continue
        try:
            tensors[name] = make(*(stored[other] for other in names))
        except UserError as fault:
            faults.append(f"{folder}: {fault}")
            continue
        except (RuntimeError, IndexError):  # of shapes that cannot even be joined
            tensors[name] = torch.empty(0)
        if tensors[name].shape != state[name].shape:
            theirs = " with ".join(f"{other} {tuple(stored[other].shape)}" for other in names)
            faults.append(f"{name} is {tuple(state[name].shape)}, {folder} has {theirs}; choose another folder")
    return tensors, faults


def _unfit(name: str, names: Iterable[str], stored: Mapping[str, Tensor], folder: str) -> Iterator[str]:
    for other in names:
        if other not in stored:
            yield f"{folder} has no {other}, of which {name} is made; fetch it again"
        elif not stored[other].is_floating_point():
            yield f"{other} in {folder} is {stored[other].dtype}; give weights that are not quantised"


def _report(sources: Sources, stored: Mapping[str, Tensor], state: Mapping[str, Tensor], folder: str) -> list[str]:
    taken = {name for names, _ in sources.values() for name in names}
    left = grouped(stored.keys() - taken, taken)
    for name, (names, _) in sources.items():
        rows, kept = len(stored[names[0]]), len(state[name])
        if names[0].endswith("wpe.weight") and kept < rows:
            left.append(f"rows {kept} to {rows - 1} of {names[0]}")
    fresh = grouped(state.keys() - sources.keys(), sources.keys())
    lines = [f"{folder}: {len(taken)} tensors taken"]
    lines += [f"{folder}: left over: {', '.join(left)}"] if left else []
    return lines + ([f"model: not in {folder}, stays as it was: {', '.join(fresh)}"] if fresh else [])
