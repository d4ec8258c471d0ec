"""Loads models from checkpoints, rebuilt from names and plain arguments only."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlm.checkpoint import adapters
from vlm.checkpoint.file import locate, read_file, weights
from vlm.checkpoint.rebuild import NoDraws, SizeLimit, rebuild
from vlm.errors import UserError

__all__ = ["build_model", "load_model", "locate", "read", "weights"]


def read(path: str | os.PathLike, *, merge: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Reads a checkpoint with `read_file`; adds the weights of the base to a checkpoint of adapters.

    Args:
        merge: Whether to merge adapters into the weights, for inference; else they stay separate, for training.
        dtype: See `read_file`.
    Raises:
        UserError: As in `read_file`, or the base of adapters is missing or different.
    """
    path = locate(path)
    return adapters.completed(path, read_file(path, dtype), merge=merge)


def build_model(checkpoint: Mapping[str, Any], *, trust: str | Sequence[str] | None = None) -> nn.Module:
    """Builds the model of a checkpoint, bounded by the size of its weights, which are not loaded.

    Args:
        trust: Packages of the user whose classes are allowed too.
    Raises:
        UserError: The checkpoint names forbidden classes, or its specification is larger than its weights.
    """
    return _built(checkpoint, trust, weights(checkpoint))


def load_model(
    checkpoint: Mapping[str, Any], *, trust: str | Sequence[str] | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Rebuilds the model of a checkpoint with its weights, in evaluation mode.

    Args:
        dtype: Type of weights and states.
        trust: Packages of the user whose classes are allowed too.
    Raises:
        UserError: As in `build_model`, or the weights do not match the specification.
    """
    try:
        state = weights(checkpoint)
        with torch.no_grad(), NoDraws():
            model = _built(checkpoint, trust, state)
        # Assigned, not copied, because a copy would need memory for all weights twice.
        whole = {name: tensor.dtype for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
        model.load_state_dict({name: tensor.to(whole.get(name, dtype)) for name, tensor in state.items()}, assign=True)
    except UserError:
        raise
    except Exception as fault:
        raise _misfit(fault) from fault
    return model.to(dtype).eval()


def _built(checkpoint: Mapping[str, Any], trust: str | Sequence[str] | None, state: Mapping[str, Tensor]) -> nn.Module:
    try:
        with SizeLimit(state):
            return rebuild(checkpoint["vlm"]["model"], trust=trust)
    except UserError:
        raise
    except Exception as fault:  # a specification may be arbitrary and break a constructor in any way
        raise _misfit(fault) from fault


def _misfit(fault: Exception) -> UserError:
    reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
    return UserError(f"the checkpoint's weights and specification do not fit ({reason}); use another checkpoint")
