"""The Vision Transformer encoder."""

from typing import Unpack

import torch
from torch import Tensor, nn

from vlm.errors import Count, Rate
from vlm.models.context import Context
from vlm.nn.blocks import Block, BlockConfig, BlockOptions, init_weights
from vlm.nn.position import GridPositions, Positions
from vlm.nn.stems import PatchEmbed


class ViT(nn.Module):
    """Vision Transformer (Dosovitskiy et al. 2021): patches, positions, blocks, a final norm.

    Args:
        image_size: Side of the square input, in pixels.
        patch_size: Side of a square patch, in pixels; divides image_size.
        depth: Number of blocks.
        drop_path: Probability of dropping a whole branch in the last block, growing linearly from 0 in the first.
        stem: Images (B, 3, H, W) -> patches (B, D, H / patch_size, W / patch_size); by default a PatchEmbed.
        class_token: Whether a learned token stands before the patches, to gather what the image shows.
        positions: Encoding of the places of patches, row by row; by default vectors that are learned, starting from
            sines and cosines of row and column.
        block: As in BlockConfig.
    Shapes:
        images (B, 3, H, W), normalised -> Context, states (B, S, D); S = (H / patch_size)², + 1 with class_token
    Raises:
        ValueError: patch_size does not divide image_size.
    """

    def __init__(
        self,
        *,
        image_size: Count,
        patch_size: Count,
        dim: Count,
        depth: Count,
        num_heads: Count,
        drop_path: Rate = 0.0,
        stem: nn.Module | None = None,
        class_token: bool = False,
        positions: Positions | None = None,
        **block: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"patch_size {patch_size} does not divide image_size {image_size}")
        config = BlockConfig(dim=dim, num_heads=num_heads, **block)
        self.dim = dim
        self.patch_embed = stem or PatchEmbed(patch_size=patch_size, dim=dim)
        self.class_token = nn.Parameter(torch.randn(dim) * dim**-0.5) if class_token else None
        grid = {"side": image_size // patch_size, "before": int(class_token)}
        self.positions = GridPositions(dim=dim, **grid) if positions is None else positions
        rates = torch.linspace(0, drop_path, depth, device="cpu").tolist()  # a model may be built on "meta"
        self.blocks = nn.ModuleList(Block(config, drop_path=rate) for rate in rates)
        self.norm = config.make_final_norm()
        init_weights(self, dim=dim, branches=2 * depth)

    def forward(self, images: Tensor) -> Context:
        # In one piece: without a class token the whole stream of residuals would stay channel-major.
        x = self.patch_embed(images).flatten(2).transpose(1, 2).contiguous()  # (B, 3, H, W) -> (B, S, D)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], 1, -1), x], dim=1)  # (B, 1 + S, D)
        places = torch.arange(x.shape[1], device=x.device)
        added = self.positions.embed(places)
        x = x if added is None else x + added.to(x.dtype)
        position = self.positions.place(places, keys=x.shape[1])
        for block in self.blocks:
            x = block(x, position=position)
        return Context(self.norm(x))
