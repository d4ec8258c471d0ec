"""The position encoding of images that a decoder writes token by token, row by row."""

import torch
from torch import Tensor

from vlm.errors import Count
from vlm.nn.image_size import ImageSize, sides
from vlm.nn.position import GridPositions, PositionInfo


class WrittenGridPositions(GridPositions):
    """Positions of the cells of a grid that a decoder writes row by row; each is that of the cell to be written next.

    A learned vector per cell is added to the input. Queries and keys are rotated by angles that grow with the row, in
    half of the pairs, and with the column, in the other half (Heo et al. 2024, axial): attention finds the cells above
    and to the left by their distance.

    Args:
        dim: Width D, a multiple of 4.
        head_dim: Width K of a head, a multiple of 4.
        image_size: Height and width of the images in pixels.
        patch_size: Side of a cell in pixels, which divides both.
    Raises:
        ValueError: A size is not such a multiple.
    """

    def __init__(self, *, dim: Count, head_dim: Count, image_size: ImageSize, patch_size: Count) -> None:
        height, width = sides(image_size)
        if head_dim % 4:
            raise ValueError(f"head_dim {head_dim} is not a multiple of 4, as positions on a grid need")
        if height % patch_size or width % patch_size:
            raise ValueError(
                f"patch_size {patch_size} does not divide the sides of images of {height} x {width} pixels"
            )
        super().__init__(dim=dim, grid=(height // patch_size, width // patch_size))
        self.max_positions = self.grid[0] * self.grid[1]
        self.head_dim = head_dim

    def place(self, positions: Tensor, *, keys: int) -> PositionInfo:
        rows, columns = positions // self.grid[1], positions % self.grid[1]
        count = self.head_dim // 4
        # Wavelengths from 4 cells to twice the longer side, beyond which distances would repeat.
        longest = max(4, 2 * max(self.grid))
        steps = torch.arange(count, device=positions.device) / max(1, count - 1)
        frequencies = 2 * torch.pi / (4 * (longest / 4) ** steps)  # (K / 4,)
        angles = torch.cat([rows[..., None] * frequencies, columns[..., None] * frequencies], dim=-1)  # (..., L, K / 2)
        if positions.ndim == 2:
            angles = angles[:, None]  # (B, 1, L, K / 2)
        return PositionInfo(rotation=(angles.cos(), angles.sin()))
