"""Encoder outputs that a decoder attends to, or that precede its text in one sequence; cached features of encoders."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import Count, UserError
from vlm.nn.position import Positions

PLACE = -1  # takes the place of a token id where the sequence has a state


@dataclass
class Context:
    """Encoder states and their mask; for a decoder with a prefix, there may be tokens between the states.

    Texts then begin with the last token of such a prompt.

    Shapes:
        states (B, S, D), mask bool (B, S), True for states that may be attended to, or None for all; tokens (B, S),
        PLACE for a state, or None for states only
    """

    states: Tensor
    mask: Tensor | None = None
    tokens: Tensor | None = None

    def rows(self, rows: slice | Tensor) -> "Context":
        """The context of a subset of rows."""
        mask, tokens = (None if part is None else part[rows] for part in (self.mask, self.tokens))
        return Context(self.states[rows], mask, tokens)

    def split_packed_rows(self, layout: Tensor | None) -> "Context":
        """Splits packed rows: returns a context with one text per row.

        Args:
            layout: See InputRows; None if each row already holds one text.
        Shapes:
            states (B, L, D), layout (N, S) -> states (N, S, D)
        """
        if layout is None:
            return self
        states = self.states.flatten(0, 1).index_select(0, layout.clamp(min=0).flatten())
        return Context(states.unflatten(0, layout.shape), layout >= 0)

    def pad_to(self, length: int) -> "Context":
        """Pads the states to a length; the padding is masked."""
        more = length - self.states.shape[1]
        if more <= 0:
            return self
        tokens = None if self.tokens is None else F.pad(self.tokens, (0, more))
        return Context(F.pad(self.states, (0, 0, 0, more)), F.pad(self.full_mask, (0, more)), tokens)

    @property
    def full_mask(self) -> Tensor:
        """The mask as a tensor, even if all states are visible: (B, S)."""
        return self.mask if self.mask is not None else self.states.new_ones(self.states.shape[:2], dtype=torch.bool)

    @property
    def last(self) -> Tensor:
        """Index of the last token of each row, (B,)."""
        return self.full_mask.sum(1) - 1

    @property
    def begin(self) -> Tensor | None:
        """The token that the texts of each row begin with, (B,); None without tokens."""
        return None if self.tokens is None else self.tokens.gather(1, self.last[:, None])[:, 0]

    @property
    def visible_mask(self) -> Tensor | None:
        """Mask of the states that texts attend to, (B, S): all but the token that texts begin with; None for all."""
        if self.tokens is None:
            return self.mask
        return self.full_mask & (torch.arange(self.states.shape[1], device=self.states.device) != self.last[:, None])


def interleave_states(rows: Sequence[Sequence[int]], states: Tensor) -> Context:
    """Creates a context of tokens with states between them; the states fill the PLACEs of all rows in order.

    Args:
        rows: Token ids of each row, with PLACE for each state.
    Shapes:
        states (number of PLACEs, D) -> states (B, S, D), mask (B, S) or None, tokens (B, S)
    """
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=states.device)
    laid_states = states.new_zeros(*tokens.shape, states.shape[-1])
    laid_states[tokens == PLACE] = states
    lengths = torch.tensor([len(row) for row in rows], device=states.device)
    mask = torch.arange(longest, device=states.device) < lengths[:, None]
    return Context(laid_states, None if min(map(len, rows)) == longest else mask, tokens)


def pick_states(states: Tensor, index: Tensor) -> Tensor:
    """Selects a state for each token of rows of text, from the states of all images of a batch in order.

    Args:
        index: Index of the state at each PLACE; any valid index elsewhere.
    Shapes:
        states (T, S, D), index (B, L) -> (B, L, D)
    """
    return states.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)


def concat_states(parts: Sequence[Context]) -> Context:
    """Concatenates contexts of the same inputs along the states.

    Shapes:
        states (B, S1, D), (B, S2, D), ... -> (B, S1 + S2 + ..., D)
    """
    masked = any(part.mask is not None for part in parts)
    states = torch.cat([part.states for part in parts], dim=1)
    return Context(states, torch.cat([part.full_mask for part in parts], dim=1) if masked else None)


def concat_batches(parts: Sequence[Context]) -> Context:
    """Concatenates contexts of several batches along the rows, padded to the longest."""
    length = max(part.states.shape[1] for part in parts)
    parts = [part.pad_to(length) for part in parts]
    masked = any(part.mask is not None for part in parts)
    mask = torch.cat([part.full_mask for part in parts]) if masked else None
    tokens = [part.tokens for part in parts if part.tokens is not None]
    return Context(torch.cat([part.states for part in parts]), mask, torch.cat(tokens) if tokens else None)


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
                raise ValueError("a prefix with tokens between its states needs counted=True")
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
        if positions.max_positions is not None and positions.max_positions < states + max_len:
            raise UserError(
                f"model.position.max_len: {positions.max_positions} positions are too few for a prefix of {states} "
                f"states and {max_len} tokens; set it to {states + max_len}, or model.decoder.prefix.counted=false"
            )
        has_tokens = context.tokens is not None  # a text begins with the last token of its context
        return states - has_tokens if context.mask is None else context.mask.sum(1) - int(has_tokens)


# Features come from the frozen part of an encoder, never change and can be cached. The frozen part is the entire
# encoder, or its backbone if the encoder projects the features of one and its projection is trained. Such an encoder
# has `backbone`, `features(images)` and `project(features)`.


@dataclass
class Features:
    """Features of images from the frozen part of an encoder; a model takes them instead of images.

    Args:
        complete: Whether they are the encoder's states, with nothing left to project.
    Shapes:
        values (B, S, C); C is D, or the width of the backbone
    """

    values: Tensor
    complete: bool = False

    def __len__(self) -> int:
        return len(self.values)

    def to(self, *args: Any, **kwargs: Any) -> "Features":
        return replace(self, values=self.values.to(*args, **kwargs))

    def pin_memory(self) -> "Features":
        return replace(self, values=self.values.pin_memory())


@runtime_checkable
class FeatureProjector(Protocol):
    """An encoder that projects the features of its attribute `backbone`."""

    def features(self, images: Tensor) -> Tensor:
        """Features of the backbone: (B, 3, H, W) -> (B, S, C)."""

    def project(self, values: Tensor) -> Context:
        """Projects features to context: (B, S, C) -> states (B, S, D)."""


def projects(encoder: Any) -> bool:
    """Returns True for an encoder, or a class of encoders, that projects features of a backbone."""
    return issubclass(encoder if isinstance(encoder, type) else type(encoder), FeatureProjector)


def frozen_part(encoder: Any) -> nn.Module:
    """The part of an encoder that computes its features."""
    is_trained = any(parameter.requires_grad for parameter in encoder.parameters())
    return encoder.backbone if projects(encoder) and is_trained else encoder


def encode(encoder: Any, images: Tensor | Features) -> Context:
    """Context of images, or of their cached features."""
    if not isinstance(images, Features):
        return encoder(images)
    values = images.values.to(next(encoder.parameters()).dtype)  # kept in bfloat16, drawn captions read in float32
    return encoder.project(values) if projects(encoder) and not images.complete else Context(values)
