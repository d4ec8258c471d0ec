"""Training of adapters instead of weights: `model/adapt=lora`."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from vlm.checkpoint.load import ADAPTERS, describe_bases
from vlm.config.build import build
from vlm.errors import UserError
from vlm.randomness import key
from vlm.training.run.processes import is_rank_zero

Adapted = tuple[dict[str, Any], set[str]]  # the entry of checkpoints, and the names of weights that they leave out


def adapt(
    model: nn.Module, config: dict[str, Any], places: Mapping[str, str], loaded: Mapping[str, Any] | None
) -> Adapted | None:
    """Freezes a model's pretrained weights and adds the adapters of model.adapt; weights without a base stay trained.

    Args:
        places: Where the weights come from, by the part of the model.
        loaded: The checkpoint of a resumed run.
    Returns:
        The adapters' entry of checkpoints and the names of weights that these leave out; None without adapters.
    Raises:
        UserError: There is nothing to adapt.
    """
    if (node := config["model"].get("adapt")) is None:
        return None
    lora = build(node, "model.adapt")
    if not places:
        raise UserError("model.adapt needs pretrained weights; set model=pretrained or model.init_from")
    if loaded is None:
        bases, held = describe_bases(model, places)
    else:
        entry = loaded[ADAPTERS]
        bases, held = entry["base"], model.state_dict().keys() - set(entry["fresh"])
    frozen = config["task"].get("freeze") or ()
    inside = tuple(f"{part}." for part in frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in held and not name.startswith(inside))
    torch.manual_seed(key(config["seed"], "adapters"))
    count = lora.adapt(model, without=frozen)
    if count == 0:
        raise UserError(
            f"model.adapt.projections: {', '.join(lora.projections)} matches no linear layer that is not frozen; "
            "layer names look like decoder.blocks.0.attn.qkv"
        )
    if is_rank_zero():
        print(_format_share(model, count, places), flush=True)
    return {"scale": lora.scale, "layers": count, "base": bases}, held


def remove_base_weights(checkpoint: dict[str, Any], names: Collection[str]) -> None:
    """Removes weights that the base of the adapters holds from a checkpoint that is being saved."""
    for entry in {"state_dict", "ema"} & checkpoint.keys() if names else ():
        every = checkpoint[entry].items()  # not changed in place: "ema" is the live average
        checkpoint[entry] = {name: tensor for name, tensor in every if name.removeprefix("model.") not in names}


def _format_share(model: nn.Module, count: int, places: Mapping[str, str]) -> str:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    total = sum(size for size, _ in sizes)
    return (
        f"adapters of {count} layers: {trained:,} of {total:,} parameters are trained ({trained / total:.2%}); "
        f"checkpoints leave the others to {', '.join(dict.fromkeys(places.values()))}"
    )
