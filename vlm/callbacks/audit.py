"""A look at what training is about to read, before it starts."""

from typing import Any, cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from vlm.data.batch import PADDING, CaptionBatch
from vlm.data.tokenizer import Tokenizer
from vlm.tasks.captioning import Captioning
from vlm.tasks.losses import IGNORE, next_token_labels


class Audit(L.Callback):
    """Prints, before the first step: inputs and targets of one sample, the share of padding, the parameter counts.

    A wrong shift of the labels or a missing end token is visible in it.

    Args:
        tokens: How many tokens of the sample are shown.
    """

    def __init__(self, *, tokens: int = 16) -> None:
        self.tokens = tokens

    @rank_zero_only
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 0 and batch_idx == 0 and len(batch.ids):
            task = cast(Captioning, pl_module)
            lines = [*parameters(task.model), *reading(batch, task.tokenizer, self.tokens)]
            print("\n".join(lines), flush=True)


def parameters(model: nn.Module) -> list[str]:
    """Lines that count the parameters of a model and of its parts."""
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return [f"parameters  {total:,} ({parts}); {trained:,} are trained"]


def reading(batch: CaptionBatch, tokenizer: Tokenizer, tokens: int) -> list[str]:
    """Lines that show the start of a batch's first row as the model reads it, and how much is padding."""
    padding = padding_share(batch.segments)
    labels = next_token_labels(batch.tokens, batch.segments)
    shape = " x ".join(map(str, batch.images.shape))
    lines = [f"batch       images {shape}, tokens {' x '.join(map(str, batch.tokens.shape))}, padding {padding:.1%}"]
    lines.append(f"sample      {batch.ids[0]}")
    lines.append("  caption   input -> target")
    row = zip(batch.tokens[0].tolist(), batch.segments[0].tolist(), labels[0].tolist(), strict=True)
    for token, segment, label in list(row)[:tokens]:
        target = "(none)" if label == IGNORE else tokenizer.piece(label)
        name = "padding" if segment == PADDING else str(segment)
        lines.append(f"  {name:>7}   {tokenizer.piece(token)!r} -> {target!r}")
    return lines


def padding_share(segments: Tensor) -> float:
    """Share of a batch's tokens that are padding."""
    return (segments == PADDING).float().mean().item()
