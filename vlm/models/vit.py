"""The Vision Transformer encoder, of one image or of several images per record."""

from typing import Unpack

import torch
from torch import Tensor, nn

from vlm.errors import Count, Rate
from vlm.models.context import Context, concat_states
from vlm.nn.blocks import Block, BlockConfig, BlockOptions, init_weights
from vlm.nn.embeddings import PatchEmbed
from vlm.nn.image_size import ImageSize, plain, sides
from vlm.nn.position import GridPositions, Positions


class ViT(nn.Module):
    """Vision Transformer (Dosovitskiy et al. 2021): patches, positions, blocks, final norm.

    Args:
        image_size: Height and width of the images, in pixels; one number for squares.
        patch_size: Side of a square patch, in pixels; divides both.
        depth: Number of blocks.
        drop_path: Probability of dropping a branch in the last block, growing linearly from 0 in the first.
        stem: Images (B, 3, H, W) -> patches (B, D, H / patch_size, W / patch_size); default a PatchEmbed.
        patch_bias: Whether that PatchEmbed has a bias.
        class_token: Whether to put a learned class token before the patches.
        distillation_token: Whether to add a second one after it (DeiT, Touvron et al. 2021); needs class_token.
        embed_norm: Whether to normalise patches before the first block, as CLIP does.
        final_norm: Whether to normalise the states after the last block.
        positions: Position encoding of the patches, row by row; default learned vectors, initialised with sines and
            cosines of row and column.
        block: See BlockConfig.
    Shapes:
        images (B, 3, H, W), normalised -> Context, states (B, S, D); S = H W / patch_size² + number of extra tokens
    Raises:
        ValueError: patch_size does not divide image_size, or distillation_token is set without class_token.
    """

    def __init__(
        self,
        *,
        image_size: ImageSize,
        patch_size: Count,
        dim: Count,
        depth: Count,
        num_heads: Count,
        drop_path: Rate = 0.0,
        stem: nn.Module | None = None,
        patch_bias: bool = True,
        class_token: bool = False,
        distillation_token: bool = False,
        embed_norm: bool = False,
        final_norm: bool = True,
        positions: Positions | None = None,
        **block: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        if any(side % patch_size for side in sides(image_size)):
            raise ValueError(f"patch_size {patch_size} does not divide image_size {plain(image_size)}")
        if distillation_token and not class_token:
            raise ValueError("distillation_token needs a class token; set class_token=true")
        config = BlockConfig(dim=dim, num_heads=num_heads, **block)
        self.dim = dim
        self.patch_embed = stem or PatchEmbed(patch_size=patch_size, dim=dim, bias=patch_bias)
        self.class_token = nn.Parameter(torch.randn(dim) * dim**-0.5) if class_token else None
        self.distillation_token = nn.Parameter(torch.randn(dim) * dim**-0.5) if distillation_token else None
        height, width = sides(image_size)
        self.grid = (height // patch_size, width // patch_size)
        if positions is None:
            positions = GridPositions(dim=dim, grid=self.grid, before=self.leading)
        self.positions = positions
        self.embed_norm = config.make_norm() if embed_norm else nn.Identity()
        rates = torch.linspace(0, drop_path, depth, device="cpu").tolist()  # the model may be built on "meta"
        self.blocks = nn.ModuleList(Block(config, drop_path=rate) for rate in rates)
        self.norm = config.make_final_norm() if final_norm else nn.Identity()
        init_weights(self, dim=dim, branches=2 * depth)

    @property
    def leading(self) -> int:
        """Number of tokens before the patches."""
        return len(self._tokens())

    def _tokens(self) -> list[Tensor]:
        return [token for token in (self.class_token, self.distillation_token) if token is not None]

    def forward(self, images: Tensor) -> Context:
        # Contiguous: without a class token, the entire residual stream would stay channel-major.
        x = self.patch_embed(images).flatten(2).transpose(1, 2).contiguous()  # (B, 3, H, W) -> (B, S, D)
        if tokens := self._tokens():
            x = torch.cat([*(token.expand(x.shape[0], 1, -1) for token in tokens), x], dim=1)  # (B, 1 or 2 + S, D)
        places = torch.arange(x.shape[1], device=x.device)
        added = self.positions.embed(places)
        x = self.embed_norm(x if added is None else x + added.to(x.dtype))
        position = self.positions.place(places, keys=x.shape[1])
        for block in self.blocks:
            x = block(x, position=position)
        return Context(self.norm(x))


class SeveralImages(nn.Module):
    """Encodes each image separately and concatenates their states in order, as Flamingo does (Alayrac et al. 2022).

    A learned vector per position in the order is added to the states of each image.

    Args:
        encoder: Images (B, 3, H, W) -> Context.
        dim: Width D of its states.
        count: Maximum number of images per record.
    Shapes:
        images (B, K, 3, H, W), or (B, 3, H, W) of one image each -> Context, states (B, K * S, D)
    """

    def __init__(self, *, encoder: nn.Module, dim: Count, count: Count) -> None:
        super().__init__()
        self.encoder, self.dim, self.count = encoder, dim, count
        self.order = nn.Parameter(torch.empty(count, dim))
        nn.init.normal_(self.order, std=0.5)

    def forward(self, images: Tensor) -> Context:
        several = images if images.ndim == 5 else images[:, None]
        rows, number = several.shape[:2]
        if number > self.count:
            raise ValueError(
                f"a record has {number} images, but the model takes at most {self.count}; increase model.encoder.count"
            )
        context = self.encoder(several.flatten(0, 1))  # (B * K, S, D)
        states = context.states.unflatten(0, (rows, number)) + self.order[:number, None]
        masks = [None] * number if context.mask is None else context.mask.unflatten(0, (rows, number)).unbind(1)
        return concat_states([Context(*pair) for pair in zip(states.unbind(1), masks, strict=True)])
