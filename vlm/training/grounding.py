"""Does a captioner look at its image? Its loss on the same captions with other images, and with none."""

from collections.abc import Callable

import torch
from torch import Tensor

from vlm.data.batch import TextRows
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.training.losses import row_losses, token_loss

BATCHES = 8  # of a validation, on each process, that are read thrice; a final evaluation reads all so

Loss = tuple[Tensor, Tensor | int]  # summed, and the count that it is a sum over


class GroundingLosses:
    """Sums of the losses under control of an evaluation's batches.

    The decoder reads each caption again beside the encoded states of another image of the batch, and beside those of a
    blank one. To a model that ignores the image all are the same; one that looks at it loses by either.
    """

    CONTROLS = ("shuffled", "blank")

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(self.CONTROLS), 2, dtype=torch.float64, device=device)
        self._last: Context | None = None

    def read(
        self, model: VisionLanguageModel, context: Context, rows: TextRows, *, blank: Context | None
    ) -> tuple[Loss, list[float]]:
        """The loss of a batch, and that of each of its images; under control too, where a blank image is there.

        Args:
            context: The batch's images, encoded.
            blank: One blank image, encoded.
        """
        hidden = model.decoder(rows.tokens, rows.segments, context)

        def loss_with(other: Context) -> Loss:
            return token_loss(model.decoder(rows.tokens, rows.segments, other), rows.targets, model.head_weight)

        sums, counts = row_losses(hidden, rows.targets, model.head_weight)
        own = sums.sum(), counts.sum()
        if blank is not None:
            self.add(own, context, blank, loss_with)
        return own, (sums / counts.clamp(min=1)).tolist()

    def add(self, own: Loss, context: Context, blank: Context, loss: Callable[[Context], Loss]) -> None:
        """Adds a batch.

        Args:
            own: Its loss with its own images.
            context: These, encoded.
            blank: One blank image, encoded.
            loss: The loss of the batch with other images than its own.
        """
        size = len(context.states)
        if size == 0:
            return
        others = self._others(context)
        self._last = _rows(context, slice(-1, None))
        for place, other in enumerate((others, _rows(blank, torch.zeros(size, dtype=torch.long)))):
            if other is not None:
                total, count = loss(other)
                self._sums[place, 0] += total.double() - own[0].double()
                self._sums[place, 1] += count

    def _others(self, context: Context) -> Context | None:
        """The states of another image for each: that half a batch away, since neighbours may be alike."""
        size = len(context.states)
        if size == 1:  # that of the batch before
            return self._last
        places = torch.arange(size).roll(size // 2)
        return _rows(context, places)

    def results(self, loss: float, summed: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """loss@shuffled and loss@blank: the loss of the split and what the control adds to it in the batches read.

        Args:
            loss: Of the whole split.
            summed: Adds a tensor over the processes.
        """
        sums = summed(self._sums).tolist()
        rows = zip(self.CONTROLS, sums, strict=True)
        return {f"loss@{name}": loss + added / count for name, (added, count) in rows if count}


def _rows(context: Context, rows: Tensor | slice) -> Context:
    return context.rows(rows.to(context.states.device) if isinstance(rows, Tensor) else rows)
