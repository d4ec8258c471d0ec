"""Tests whether a captioner uses its images: its loss on the same captions with other images, and with blank ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from vlm.data.batch import TextRows
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.nn.precision import widest
from vlm.training.step.losses import row_losses

Losses = tuple[Tensor, Tensor]  # sums and counts of rows, each (B,)


class GroundingLosses:
    """Losses of an evaluation's samples, with controls.

    The decoder reads each image with another sample's captions, and each sample's captions with a blank image. Both
    leave the loss of a model that ignores images unchanged, and raise that of a model that uses them. Partners depend
    only on the places of samples in the split, so that neither batches nor processes change the results.

    Args:
        size: Number of samples of the split.
        device: Where losses are summed.
    """

    CONTROLS = ("shuffled", "blank")

    def __init__(self, size: int, device: torch.device) -> None:
        self._sums = torch.zeros(1 + len(self.CONTROLS), size, 2, dtype=widest(device), device=device)

    def read(
        self, model: VisionLanguageModel, context: Context, rows: TextRows, *, blank: Context | None
    ) -> tuple[Losses, list[float]]:
        """Returns the losses of a batch's rows, as sums and as means; adds them and the controls if `blank` is given.

        Args:
            context: The batch's images, encoded.
            blank: One blank image, encoded.
        """

        def losses(rows: TextRows, context: Context) -> Losses:
            hidden = model.decoder(rows.tokens, rows.segments, context)
            return row_losses(hidden, rows.targets, model.head_parts)

        own = losses(rows, context)
        if blank is not None:
            self.add(rows, own, context, blank, losses)
        return own, (own[0] / own[1].clamp(min=1)).tolist()

    def add(
        self,
        rows: TextRows,
        own: Losses,
        context: Context,
        blank: Context,
        losses: Callable[[TextRows, Context], Losses],
    ) -> None:
        """Adds a batch.

        Args:
            rows: The captions, with those of the samples' partners.
            own: Losses of the captions with their own images.
            context: The encoded images.
            blank: One blank image, encoded.
            losses: Computes the losses of captions with images.
        """
        self._put(0, rows.places, own)
        others = rows.others
        if others is not None and others.places != rows.places:  # a lone sample is its own partner
            self._put(1, others.places, losses(others, context))
        same = torch.zeros(len(rows.places), dtype=torch.long, device=blank.states.device)
        self._put(2, rows.places, losses(rows, blank.rows(same)))

    def _put(self, kind: int, places: list[int], losses: Losses) -> None:
        index = torch.tensor(places, device=self._sums.device)
        self._sums[kind, index] = torch.stack(losses, dim=1).to(self._sums.dtype)

    def results(self, loss: float, summed: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Returns loss@shuffled and loss@blank: the split's loss plus a control's increase, on samples that have both.

        Args:
            loss: Loss of the whole split.
            summed: Sums a tensor over the processes.
        """
        own, *controls = summed(self._sums).cpu()
        losses = {}
        for name, other in zip(self.CONTROLS, controls, strict=True):
            both = (own[:, 1] > 0) & (other[:, 1] > 0)
            if both.any():
                added = (other[both, 0] - own[both, 0]).sum() / own[both, 1].sum()
                losses[f"loss@{name}"] = loss + added.item()
        return losses
