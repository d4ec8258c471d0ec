"""Fusion inside the sequence: the context precedes the text. (Cross-attention is part of the blocks.)"""

import torch
from torch import Tensor, nn

from vlm.errors import Count, UserError
from vlm.models.context import Context
from vlm.nn.position import Positions


class Prefix(nn.Module):
    """Context states, possibly with tokens between them, as the beginning of a decoder's sequence.

    They pass through all blocks and are visible to every text of their row (GIT: Wang et al. 2022; LLaVA: Liu et al.
    2023; PaliGemma: Beyer et al. 2024).

    Args:
        dim: Width D of the decoder.
        context_dim: Width of the context's states; they are projected to D if it differs.
        project: Whether to project them even if the widths are equal, as in GIT.
        norm: Whether to normalise states before the blocks, as GIT does.
        norm_eps: Epsilon of that norm.
        counted: Whether states occupy the first positions and the text continues after them, as in PaliGemma; else they
            have no positions and the text starts at 0, as in GIT.
        causal: Whether the prefix attends causally, as in LLaVA; else each of its states attends to all of them.
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
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.context_dim, self.counted, self.causal = context_dim, counted, causal
        self.project = nn.Linear(context_dim, dim) if project or context_dim != dim else nn.Identity()
        self.norm = nn.LayerNorm(dim, eps=norm_eps) if norm else nn.Identity()

    def forward(self, states: Tensor) -> Tensor:
        return self.norm(self.project(states))

    def places(self, context: Context) -> Tensor | None:
        """Positions of a context, (S,) or (B, S); None if it has none.

        Raises:
            ValueError: There are tokens, which need positions.
        """
        if not self.counted:
            if context.tokens is not None:
                raise ValueError("tokens between states have positions; set counted=True")
            return None
        if context.mask is None:
            return torch.arange(context.states.shape[1], device=context.states.device)
        return (context.mask.cumsum(1) - 1).clamp(min=0)

    def first(self, context: Context, positions: Positions, max_len: int) -> int | Tensor:
        """Position of the first token of a text with up to max_len tokens after a context; (B,) if it is masked.

        Raises:
            UserError: Positions are counted and there are too few.
        """
        states = context.states.shape[1]
        if not self.counted:
            return 0
        if positions.room is not None and positions.room < states + max_len:
            raise UserError(
                f"model.position.max_len: {positions.room} positions are too few for a prefix of {states} states and "
                f"{max_len} tokens; set it to {states + max_len}, or model.decoder.prefix.counted=false"
            )
        begun = context.tokens is not None  # a text begins with the last token of its context
        return states - begun if context.mask is None else context.mask.sum(1) - int(begun)
