"""Exports adapters in the format of the peft library, for models of Hugging Face folders."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.pretrained.adapted import PREFIX, find_tied_heads, name_modules
from vlm.models.pretrained.architecture import Export
from vlm.models.pretrained.export import split_weight
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import map_folder
from vlm.models.pretrained.stack import WeightMap, concatenate
from vlm.nn.lora import A, B
from vlm.untrusted.sizes import JsonValue

MERGED = "use --to huggingface, which merges adapters"
TASK_TYPES = {
    "GPT2LMHeadModel": "CAUSAL_LM",
    "MarianMTModel": "SEQ_2_SEQ_LM",
    "T5ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


def export_adapters(
    model: nn.Module,
    folder: Folder,
    adapters: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    *,
    scale: float,
    base: str,
) -> Export:
    """Converts adapters to the content of adapter_config.json and tensors.

    A layer of ours that is several of theirs, such as queries, keys and values, gives each the same A and its rows of
    B. Weights that were trained without adapters go to modules_to_save, with the other weights of their modules.

    Args:
        model: The model without adapters; it may be on "meta".
        folder: The base.
        adapters: Tensors A and B by our names.
        saved: Weights that were trained without adapters, by our names.
        scale: Factor of the update B A.
        base: Path or name of the base, for transformers.
    Raises:
        UserError: peft cannot represent them; the message names the layer or the weight.
    """
    weights, stored = map_folder(model, folder)
    modules = name_modules(folder, stored)
    uses = [name for weight in weights.values() for name in weight.names]
    config: dict[str, JsonValue] = {"peft_type": "LORA", "base_model_name_or_path": base, "bias": "none"}
    tensors: dict[str, Tensor] = {}
    transposed = False
    rank = 0
    for stem in sorted(name.removesuffix(A) for name in adapters if name.endswith(f".{A}")):
        weight, a, b = weights.get(f"{stem}weight"), adapters[f"{stem}{A}"], adapters[f"{stem}{B}"]
        if weight is None or weight.read not in (concatenate, torch.t) or any(uses.count(n) > 1 for n in weight.names):
            raise UserError(
                f"{stem}lora_a: {folder.origin} has no linear layer with the same inputs and outputs; {MERGED}"
            )
        transposed, rank = transposed or weight.read is torch.t, len(a)
        rows = [stored[name].shape[-1 if weight.read is torch.t else 0] for name in weight.names]
        for name, part in zip(weight.names, b.split(rows), strict=True):
            path = f"{PREFIX}{modules[name].removesuffix('.weight')}"
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": part}
    adapted = {name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name}
    whole = _convert_modules(model, folder, weights, stored, saved)
    for name in {name.rpartition(".")[0] for name in whole} & adapted:
        raise UserError(f"{name}: has an adapter, and another of its weights was trained without; {MERGED}")
    tensors |= {f"{PREFIX}{name}": tensor for name, tensor in whole.items()}
    alpha = scale * rank
    kind = folder.origin
    config |= {
        "task_type": "CAUSAL_LM" if kind.endswith("ForCausalLM") else TASK_TYPES.get(kind),
        "auto_mapping": {"base_model_class": kind, "parent_library": "transformers"},
        "r": rank,
        "lora_alpha": round(alpha) if abs(alpha - round(alpha)) < 1e-9 * alpha else alpha,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "target_modules": _abbreviate(adapted, {name.rpartition(".")[0] for name in modules.values()}),
        # Entire names, because peft would take "norm" for "input_layernorm" too.
        "modules_to_save": [*sorted({name.rpartition(".")[0] for name in whole})] or None,
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    return config, tensors


def _convert_modules(
    model: nn.Module,
    folder: Folder,
    weights: WeightMap,
    stored: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Returns all tensors of their modules that have trained weights, by the names in their class.

    An embedding that is also the output head is both, because peft would separate them.

    Args:
        weights, stored: See `map_folder`.
        saved: The trained weights by our names.
    Raises:
        UserError: They have no such weight, or use it twice; the message names it.
    """
    uses = [name for weight in weights.values() for name in weight.names]
    tied = find_tied_heads(folder)
    replaced: dict[str, Tensor] = {}
    for name, tensor in saved.items():
        weight = weights.get(name)
        parts = {} if weight is None else split_weight(weight, tensor, model, name)
        if not parts or any(uses.count(n) > 1 or stored[n].shape != part.shape for n, part in parts.items()):
            raise UserError(f"{name}: was trained, and {folder.origin} has no such weight of its own; {MERGED}")
        replaced |= parts | {tied[n]: part.clone() for n, part in parts.items() if n in tied}
    modules = name_modules(folder, {*stored, *replaced})
    whole = {modules[name].rpartition(".")[0] for name in replaced}
    tensors = {modules[name]: tensor for name, tensor in {**stored, **replaced}.items()}
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] in whole}


def _abbreviate(adapted: Collection[str], modules: Collection[str]) -> list[JsonValue]:
    """Returns the last parts of the names of modules if they select exactly these modules, else the entire names."""
    ends = {name.rpartition(".")[2] for name in adapted}
    selected = {name for name in modules if name.rpartition(".")[2] in ends}
    return [*sorted(ends if selected == {*adapted} else adapted)]
