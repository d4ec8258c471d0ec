"""Fusion by prefix: the context becomes part of the decoder's sequence. (Cross-attention is part of the blocks.)"""

import torch
from torch import Tensor, nn

from vlm.errors import Count, UserError
from vlm.models.context import Context
from vlm.nn.position import NO_POSITIONS, PositionInfo, Positions


class Prefix(nn.Module):
    """Context states as the first tokens of a decoder (GIT: Wang et al. 2022; PaliGemma: Beyer et al. 2024).

    They pass through all blocks, attend to one another in both directions, and are visible to every text of their row.

    Args:
        dim: Width D of the decoder.
        context_dim: Width of the context's states; they are projected to D if it differs.
        project: Whether to project them even if the widths are equal, as GIT does.
        norm: Whether to normalise states before the blocks, as GIT does.
        norm_eps: Epsilon of that norm.
        counted: Whether states occupy the first positions and the text continues after them, as in PaliGemma; else they
            have no positions and the text starts at 0, as in GIT.
    Shapes:
        states (B, S, context_dim) -> (B, S, D)
    """

    def __init__(
        self,
        *,
        dim: Count,
        context_dim: Count,
        project: bool = False,
        norm: bool = False,
        norm_eps: float = 1e-5,
        counted: bool = False,
    ) -> None:
        super().__init__()
        self.context_dim, self.counted = context_dim, counted
        self.project = nn.Linear(context_dim, dim) if project or context_dim != dim else nn.Identity()
        self.norm = nn.LayerNorm(dim, eps=norm_eps) if norm else nn.Identity()

    def forward(self, states: Tensor, positions: Positions) -> tuple[Tensor, PositionInfo]:
        """The prefix's input to the blocks, and its positions."""
        x = self.norm(self.project(states))
        if not self.counted:
            return x, NO_POSITIONS
        places = torch.arange(x.shape[1], device=x.device)
        added, place = positions.embed(places), positions.place(places, keys=x.shape[1])
        return x if added is None else x + added.to(x.dtype), PositionInfo(added=place.added, rotation=place.rotation)

    def first(self, context: Context, positions: Positions, max_len: int) -> int:
        """Position of the first token of a text with up to max_len tokens after a context.

        Raises:
            UserError: Positions are counted and there are too few, or some states are masked.
        """
        states = context.states.shape[1]
        if not self.counted:
            return 0
        if context.mask is not None:
            raise UserError("model.decoder.prefix.counted: not supported with a masked context; set it to false")
        if positions.room is not None and positions.room < states + max_len:
            raise UserError(
                f"model.position.max_len: {positions.room} positions are too few for a prefix of {states} states and "
                f"{max_len} tokens; set it to {states + max_len}, or model.decoder.prefix.counted=false"
            )
        return states
