"""Transformer blocks and their parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import Count, Range, Rate
from vlm.nn.attention import CrossAttention, Mask, SelfAttention
from vlm.nn.dropout import Dropout
from vlm.nn.position import NO_POSITIONS, PositionInfo

Norm = Literal["layer", "rms", "rms_plus_one"]
Activation = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "swiglu", "geglu", "geglu_tanh"]
QueryKeyNorm = bool | Literal["rms"]


class BlockOptions(TypedDict, total=False):
    """Arguments that a model passes on to its blocks; `BlockConfig` documents them and has their defaults."""

    head_dim: Count | None
    num_kv_heads: Count | None
    mlp_ratio: Annotated[float, Range(above=0)]
    hidden_dim: Count | None
    activation: Activation
    norm: Norm
    norm_eps: float
    pre_norm: bool
    qk_norm: QueryKeyNorm
    attn_scale: float | None
    bias: bool
    qkv_bias: bool | None
    dropout: Rate


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Options that the blocks of a stack share.

    Args:
        dim: Width D of the residual stream.
        num_heads: Number N of heads.
        head_dim: Width K of a head; default D / N.
        num_kv_heads: Number of heads of keys and values, each shared by a group of query heads; default N.
        mlp_ratio: Hidden width of the MLP divided by D; a gated MLP has two thirds of it. Unused with hidden_dim.
        hidden_dim: Hidden width of the MLP; default from mlp_ratio.
        activation: Activation of the MLP; "gelu_tanh" is GPT-2's approximation, "quick_gelu" CLIP's; "silu" is swish.
            "swiglu", "geglu" and "geglu_tanh" are gated units.
        norm: "layer" (Ba et al. 2016), "rms" (Zhang and Sennrich 2019), or "rms_plus_one", which scales by 1 + w.
        norm_eps: Added to the variance for numerical stability.
        pre_norm: Whether to normalise the input of a branch (Xiong et al. 2020), else the stream after each branch
            (Vaswani et al. 2017).
        qk_norm: Whether attention uses cosines with a learned scale; "rms" for RMSNorm of each head's queries and keys.
        attn_scale: Factor of the products of queries and keys; default 1 / √K. T5 has 1.
        bias: Whether linear layers and norms have biases.
        qkv_bias: Whether the query, key and value projections have biases; default `bias`.
        dropout: Dropout rate of branch outputs and attention weights.
    """

    dim: int
    num_heads: int
    head_dim: int | None = None
    num_kv_heads: int | None = None
    mlp_ratio: float = 4.0
    hidden_dim: int | None = None
    activation: Activation = "gelu"
    norm: Norm = "layer"
    norm_eps: float = 1e-5
    pre_norm: bool = True
    qk_norm: QueryKeyNorm = False
    attn_scale: float | None = None
    bias: bool = True
    qkv_bias: bool | None = None
    dropout: float = 0.0

    def make_norm(self) -> nn.Module:
        if self.norm != "layer":
            kind = nn.RMSNorm if self.norm == "rms" else RMSNormPlusOne
            return kind(self.dim, eps=self.norm_eps)
        return nn.LayerNorm(self.dim, eps=self.norm_eps, bias=self.bias)

    def make_final_norm(self) -> nn.Module:
        """The norm after the last block; an identity for post-norm."""
        return self.make_norm() if self.pre_norm else nn.Identity()

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        hidden = int(self.dim * self.mlp_ratio)
        return self.hidden_dim or (round(hidden * 2 / 3) if self.activation in GATES else hidden)

    def make_mlp(self) -> nn.Module:
        kind = GatedMLP if self.activation in GATES else MLP
        return kind(dim=self.dim, hidden_dim=self.hidden, bias=self.bias, activation=self.activation)

    def attention_options(self) -> dict[str, Any]:
        """Options that self-attention and cross-attention share."""
        names = ("dim", "num_heads", "head_dim", "num_kv_heads", "dropout", "bias", "qk_norm", "attn_scale", "norm_eps")
        return {name: getattr(self, name) for name in names}


def gelu_tanh(x: Tensor) -> Tensor:
    """GPT-2's approximation of GELU."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of GELU (Hendrycks and Gimpel 2016, section 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": gelu_tanh}


class RMSNormPlusOne(nn.RMSNorm):
    """RMSNorm that scales by 1 + w, with w initialised to 0; weight decay pulls the scale to 1 (Gemma, 2024)."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class MLP(nn.Module):
    """The position-wise feed-forward network (Vaswani et al. 2017, section 3.3).

    Args:
        activation: "relu", "gelu" (Hendrycks and Gimpel 2016), "gelu_tanh", "quick_gelu" or "silu" (Ramachandran et
            al. 2017).
    Shapes:
        x (B, L, D) -> (B, L, D)
    """

    def __init__(self, *, dim: int, hidden_dim: int, bias: bool = True, activation: str = "gelu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.fc1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class GatedMLP(nn.Module):
    """A gated feed-forward network (Shazeer 2020, equation 6): W2 (g(x W) * x V).

    With three matrices, it has as many parameters as an MLP at two thirds of its hidden width.

    Args:
        activation: "swiglu", "geglu", or "geglu_tanh" by GPT-2's approximation of GELU.
    Shapes:
        x (B, L, D) -> (B, L, D)
    """

    def __init__(self, *, dim: int, hidden_dim: int, bias: bool = True, activation: str = "swiglu") -> None:
        super().__init__()
        self.gate = GATES[activation]
        self.fc1 = nn.Linear(dim, 2 * hidden_dim, bias=bias)  # gate and value
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(self.gate(gate) * value)


class DropPath(nn.Module):
    """Drops a residual branch per sample (stochastic depth, Huang et al. 2016).

    Args:
        rate: Probability of dropping the branch of a sample; the kept ones are scaled by 1 / (1 - rate).
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
    """A transformer block: self-attention and an MLP, each in a residual branch.

    Args:
        config: Options that all blocks of the stack share.
        drop_path: Probability of dropping a branch for a sample.
    Shapes:
        x (B, L, D) -> (B, L, D)
    """

    def __init__(self, config: BlockConfig, *, drop_path: float = 0.0) -> None:
        super().__init__()
        self.config, self.pre_norm = config, config.pre_norm
        self.norm1 = config.make_norm()
        self.attn = SelfAttention(qkv_bias=config.qkv_bias, **config.attention_options())
        self.norm2 = config.make_norm()
        self.mlp = config.make_mlp()
        self.dropout = Dropout(config.dropout)
        self.drop_path = DropPath(rate=drop_path)

    def residual(self, x: Tensor, norm: nn.Module, branch: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.drop_path(self.dropout(branch(norm(x))))
        return norm(x + self.drop_path(self.dropout(branch(x))))

    def forward(self, x: Tensor, mask: Mask = None, position: PositionInfo = NO_POSITIONS) -> Tensor:
        x = self.residual(x, self.norm1, lambda x: self.attn(x, mask, position))
        return self.residual(x, self.norm2, self.mlp)


class DecoderBlock(Block):
    """A causal Block with cross-attention to context between self-attention and MLP (Vaswani et al. 2017, figure 1).

    Args:
        config: Options that all blocks of the stack share.
        context_dim: Width of the context; None for a decoder without cross-attention.
    Shapes:
        x (B, L, D), keys and values of the context (B, N, S, K) -> (B, L, D)
    """

    def __init__(self, config: BlockConfig, *, context_dim: int | None) -> None:
        super().__init__(config)
        self.cross_attn: CrossAttention | None = None
        if context_dim is not None:
            self.norm_cross = config.make_norm()
            self.cross_attn = CrossAttention(context_dim=context_dim, **config.attention_options())

    def keys_values(self, states: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Keys and values of context states (B, S, context_dim) for `forward`; None without context."""
        return None if self.cross_attn is None or states is None else self.cross_attn.keys_values(states)

    def forward(  # unlike Block's: causal by default, with context
        self,
        x: Tensor,
        mask: Mask = "causal",
        position: PositionInfo = NO_POSITIONS,
        *,
        context: tuple[Tensor, Tensor] | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        cross = self.cross_attn
        x = self.residual(x, self.norm1, lambda x: self.attn(x, mask, position))
        if cross is not None and context is not None:
            x = self.residual(x, self.norm_cross, lambda x: cross(x, context, context_mask))
        return self.residual(x, self.norm2, self.mlp)


def init_weights(module: nn.Module, *, dim: int, branches: int) -> None:
    """GPT-2's initialisation, adapted to any width: normal weights, zero biases, residual outputs scaled with depth.

    GPT-2's standard deviation of 0.02 at D = 768 becomes 0.5 / √D, which keeps the scale of activations at other
    widths. The output weights of a branch are divided by the root of the number of branches (Radford et al. 2019,
    section 2.3), which keeps the variance of the residual stream independent of depth.

    Args:
        dim: Width D.
        branches: Number of residual branches of the stack.
    """
    std = 0.5 * dim**-0.5
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            is_output = name.endswith(("proj", "fc2"))
            nn.init.normal_(layer.weight, std=std * branches**-0.5 if is_output else std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, std=std)
