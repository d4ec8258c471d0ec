"""Reading a checkpoint for the command of one task."""

from typing import Any

from torch import Tensor, nn

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.verify import refusing
from vlm.data.images.image import Preprocess
from vlm.errors import UserError

COMMANDS = {"captioning": "caption", "classification": "classify", "language_modeling": "generate"}


def read_for(task: str, path: str) -> dict[str, Any]:
    """Reads a checkpoint that must hold a model for this task.

    Raises:
        UserError: As `checkpoint.load.read`, or the model is for another task; the message names the command for it.
    """
    loaded = ckpt.read(path)
    with refusing(path):
        held = str(loaded["vlm"]["task"])
    if held != task:
        command = COMMANDS.get(held, "predict")
        raise UserError(f"{path}: holds a model for {held}, not for {task}; use `vlm {command}`")
    return loaded


def normalized(model: nn.Module, preprocess: Preprocess, pixels: Tensor) -> Tensor:
    """Images as a model's first layer takes them: uint8 (B, 3, H, W) -> the same, of the type of its weights."""
    return preprocess.normalize(pixels).to(next(model.parameters()).dtype)


def check_outputs(logits: Tensor, count: int, what: str) -> None:
    """Refuses a model that does not tell as many things apart as the checkpoint names.

    Raises:
        UserError: The two counts differ.
    """
    if logits.shape[-1] != count:
        raise UserError(f"the checkpoint has {count} {what}, its model {logits.shape[-1]}; use another checkpoint")
