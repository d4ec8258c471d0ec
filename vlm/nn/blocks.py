"""Transformer blocks and their parts."""

import torch
from torch import Tensor, nn

from vlm.nn.attention import CrossAttention, KeyValueCache, MayAttend, SelfAttention


class MLP(nn.Module):
    """The position-wise feed-forward network (Vaswani et al. 2017, section 3.3) with GELU.

    Shapes:
        x (B, L, D) -> (B, L, D)
    """

    def __init__(self, *, dim: int, hidden_dim: int, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class DropPath(nn.Module):
    """Drops a residual branch for whole rows (stochastic depth, Huang et al. 2016).

    Args:
        rate: Probability of dropping the branch of a row; the kept ones are scaled by 1 / (1 - rate).
    """

    def __init__(self, *, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = torch.rand(x.shape[0], 1, 1, device=x.device) >= self.rate
        return x * keep / (1 - self.rate)


class Block(nn.Module):
    """A pre-norm transformer block (Xiong et al. 2020): self-attention, then the MLP, each in a residual branch.

    Args:
        dim: Width D of the residual stream.
        num_heads: Number N of heads.
        head_dim: Width K of a head; by default D / N.
        mlp_ratio: Hidden width of the MLP over D.
        dropout: Probability of dropping an element of a branch's output, and an attention weight.
        drop_path: Probability of dropping a whole branch for a row.
    Shapes:
        x (B, L, D) -> (B, L, D)
    """

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = SelfAttention(dim=dim, num_heads=num_heads, head_dim=head_dim, dropout=dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim=dim, hidden_dim=int(dim * mlp_ratio))
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(rate=drop_path)

    def residual(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + self.drop_path(self.dropout(branch))

    def forward(self, x: Tensor, may_attend: MayAttend = None) -> Tensor:
        x = self.residual(x, self.attn(self.norm1(x), may_attend))
        return self.residual(x, self.mlp(self.norm2(x)))


class DecoderBlock(Block):
    """A causal Block with cross-attention to context between self-attention and MLP (Vaswani et al. 2017, figure 1).

    Args:
        context_dim: Width of the context; None for a decoder without context, which has no cross-attention.
        others: As in Block.
    Shapes:
        x (B, L, D), keys and values of the context (B, N, S, K) -> (B, L, D)
    """

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        context_dim: int | None,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(
            dim=dim,
            num_heads=num_heads,
            head_dim=head_dim,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            drop_path=drop_path,
        )
        self.cross_attn: CrossAttention | None = None
        if context_dim is not None:
            self.norm_cross = nn.LayerNorm(dim)
            self.cross_attn = CrossAttention(
                dim=dim, context_dim=context_dim, num_heads=num_heads, head_dim=head_dim, dropout=dropout
            )

    def keys_values(self, states: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Keys and values of context states (B, S, context_dim) for `forward`; None without context."""
        return None if self.cross_attn is None or states is None else self.cross_attn.keys_values(states)

    def forward(  # a decoder's block is causal and takes context
        self,
        x: Tensor,
        may_attend: MayAttend = "causal",
        context: tuple[Tensor, Tensor] | None = None,
        context_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        x = self.residual(x, self.attn(self.norm1(x), may_attend, cache))
        if self.cross_attn is not None and context is not None:
            x = self.residual(x, self.cross_attn(self.norm_cross(x), context, context_mask))
        return self.residual(x, self.mlp(self.norm2(x)))


def init_weights(module: nn.Module, *, dim: int, branches: int) -> None:
    """GPT-2's initialisation for any width: normal weights, zero biases, residual outputs scaled down with depth.

    GPT-2's standard deviation, 0.02 at D = 768, is 0.5 / √D, which keeps the size of activations at other widths too.
    Each residual branch adds to one stream, so what a branch writes is divided by the root of their number (Radford et
    al. 2019, section 2.3), which keeps the stream's variance independent of depth.

    Args:
        dim: Width D.
        branches: How many residual branches the stack has.
    """
    std = 0.5 * dim**-0.5
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            writes = name.endswith(("proj", "fc2"))
            nn.init.normal_(layer.weight, std=std * branches**-0.5 if writes else std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, std=std)
