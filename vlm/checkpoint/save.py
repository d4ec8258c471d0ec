"""Writes checkpoints atomically."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vlm.errors import UserError
from vlm.io.atomic import atomic_write, remove_unfinished


def write(path: str | os.PathLike, checkpoint: Mapping[str, Any], *, keep: Path | None = None) -> None:
    """Writes a checkpoint to a temporary file, syncs it and renames it, so that a kill leaves the old one intact.

    Args:
        keep: New name for the old checkpoint; default is to replace it.
    Raises:
        UserError: The disk is full or the folder is not writable; the old checkpoint is not changed.
    """
    path = Path(path)
    try:
        remove_unfinished(path.parent, path.name)
        with atomic_write(path, keep=keep) as file:
            torch.save(dict(checkpoint), file)
    except (OSError, RuntimeError) as fault:  # torch's writer reports a full disk as a RuntimeError
        reason = _reason(fault)
        raise UserError(
            f"{path}: cannot write the checkpoint ({reason}); free space or choose another folder", 1
        ) from fault


def _reason(fault: BaseException) -> str:
    """The system's reason, which torch may hide behind its own error."""
    first: BaseException | None = fault
    while first is not None and not isinstance(first, OSError):
        first = first.__context__
    return (first.strerror if isinstance(first, OSError) else None) or str(fault).splitlines()[0]
