"""The Vision Transformer encoder."""

import torch
from torch import Tensor, nn

from vlm.models.context import Context
from vlm.nn.blocks import Block, init_weights
from vlm.nn.patch import PatchEmbed
from vlm.nn.position import sincos_2d


class ViT(nn.Module):
    """Vision Transformer (Dosovitskiy et al. 2021): patches, learned positions, pre-norm blocks, a final norm.

    Args:
        image_size: Side of the square input, in pixels.
        patch_size: Side of a square patch, in pixels; divides image_size.
        dim: Width D.
        depth: Number of blocks.
        num_heads: Number N of heads.
        head_dim: Width K of a head; by default D / N.
        mlp_ratio: Hidden width of the MLP over D.
        dropout: Probability of dropping an element of a residual branch's output, and an attention weight.
        drop_path: Probability of dropping a whole branch in the last block, growing linearly from 0 in the first.
        stem: Images (B, 3, H, W) -> patches (B, D, H / patch_size, W / patch_size); by default a PatchEmbed.
    Shapes:
        images (B, 3, H, W), normalised -> Context with states (B, S, D), S = (H / patch_size)²
    Raises:
        ValueError: patch_size does not divide image_size.
    """

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        dim: int,
        depth: int,
        num_heads: int,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        stem: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"patch_size {patch_size} does not divide image_size {image_size}")
        self.dim = dim
        self.patch_embed = stem or PatchEmbed(patch_size=patch_size, dim=dim)
        # Learned from here on. From small random values, telling places apart costs most of a short training.
        self.pos_embed = nn.Parameter(0.5 * sincos_2d(image_size // patch_size, dim))
        rates = torch.linspace(0, drop_path, depth).tolist()
        self.blocks = nn.ModuleList(
            Block(
                dim=dim,
                num_heads=num_heads,
                head_dim=head_dim,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                drop_path=rate,
            )
            for rate in rates
        )
        self.norm = nn.LayerNorm(dim)
        init_weights(self, dim=dim, branches=2 * depth)

    def forward(self, images: Tensor) -> Context:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)  # (B, 3, H, W) -> (B, S, D)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return Context(self.norm(x))
