"""Initialises a new run's model with weights of other models and with the bytes of its tokenizer's pieces."""

from typing import Any

from torch import nn

from vlm.config.tree import walk
from vlm.errors import printable_lines
from vlm.nn.spelling import Spelling
from vlm.training.run.processes import is_rank_zero


def start_places(config: dict[str, Any]) -> dict[str, str]:
    """The `init_from` of the model and of its parts, by part."""
    keys = {key.rpartition(".")[::2]: value for key, value in walk(config["model"]) if value is not None}
    return {part: value for (part, name), value in keys.items() if name == "init_from"}


def start_from(model: nn.Module, config: dict[str, Any], tokenizer: Any = None) -> None:
    """Copies the weights named by `init_from` and prints which; Spelling modules learn the tokenizer's pieces."""
    if places := start_places(config):
        from vlm.checkpoint import start

        lines = start.start_from(model, places, tokenizer)
        if is_rank_zero():
            print(printable_lines("\n".join(lines)), flush=True)
    for part in model.modules():
        if isinstance(part, Spelling):
            part.learn([tokenizer.bytes_of(id) for id in range(tokenizer.vocab_size)])
