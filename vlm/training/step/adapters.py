"""Training of adapters instead of weights: `model/adapt=lora`."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from vlm.checkpoint.load import ADAPTERS, based
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
        raise UserError("model.adapt: there is nothing to adapt; name weights by model=pretrained or model.init_from")
    if loaded is None:
        bases, held = based(model, places)
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
            f"model.adapt.projections: {', '.join(lora.projections)}: the model has no such linear layer that is not "
            "frozen; names are as in decoder.blocks.0.attn.qkv"
        )
    if is_rank_zero():
        print(_share(model, count, places), flush=True)
    return {"scale": lora.scale, "layers": count, "base": bases}, held


def leave_out(checkpoint: dict[str, Any], names: Collection[str]) -> None:
    """Removes the weights that the adapters' base holds from a checkpoint that is being saved."""
    for entry in {"state_dict", "ema"} & checkpoint.keys() if names else ():
        every = checkpoint[entry].items()  # not changed in place: "ema" is the live average
        checkpoint[entry] = {name: tensor for name, tensor in every if name.removeprefix("model.") not in names}


def _share(model: nn.Module, count: int, places: Mapping[str, str]) -> str:
    every = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    learns, whole = sum(size for size, trained in every if trained), sum(size for size, _ in every)
    return (
        f"adapters of {count} layers: {learns:,} of {whole:,} parameters learn ({learns / whole:.2%}); checkpoints "
        f"leave the others to {', '.join(dict.fromkeys(places.values()))}"
    )
