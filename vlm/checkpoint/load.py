"""Checkpoints as models: complete, and rebuilt from names and plain arguments only."""

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
    """Reads a checkpoint of ours as `read_file` does, one of adapters alone with the weights of its base.

    Args:
        merge: Whether adapters become part of the weights that they adapt, as using the model needs it; else they
            stand beside those, as training has them.
        dtype: As in `read_file`.
    Raises:
        UserError: As `read_file`, or the base of adapters is missing, or another.
    """
    path = locate(path)
    return adapters.completed(path, read_file(path, dtype), merge=merge)


def build_model(checkpoint: Mapping[str, Any], *, trust: str | Sequence[str] | None = None) -> nn.Module:
    """Builds the model of a checkpoint within the size of its weights, which it does not load.

    Args:
        trust: Packages of the user's own whose classes may be built too.
    Raises:
        UserError: The checkpoint names classes that may not be built, or asks for more than its weights fill.
    """
    return _built(checkpoint, trust, weights(checkpoint))


def load_model(
    checkpoint: Mapping[str, Any], *, trust: str | Sequence[str] | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Rebuilds the model of a checkpoint with its weights, in evaluation mode.

    Args:
        dtype: Of weights and states.
        trust: Packages of the user's own whose classes may be built too.
    Raises:
        UserError: As `build_model`, or the weights do not fit the specification.
    """
    try:
        state = weights(checkpoint)
        with torch.no_grad(), NoDraws():
            model = _built(checkpoint, trust, state)
        # The tensors become the model's own: a copy would hold all weights twice.
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
    except Exception as fault:  # a specification may hold anything, and break a constructor in any way
        raise _misfit(fault) from fault


def _misfit(fault: Exception) -> UserError:
    reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
    return UserError(f"the checkpoint's weights and specification do not fit ({reason}); use another checkpoint")
