"""Projectors from an encoder's states to the inputs of a decoder."""

from typing import Literal

from torch import Tensor, nn

from vlm.errors import Count, UserError
from vlm.models.context import Context
from vlm.nn.blocks import ACTIVATIONS
from vlm.nn.image_size import ImageSize, grid_of


class LinearProjector(nn.Module):
    """A linear layer; squares of neighbouring states may be concatenated first (PaliGemma; pixel shuffle: Idefics3).

    Args:
        context_dim: Width C of the encoder's states.
        dim: Width D of the decoder.
        shuffle: Side of these squares; 1 for none.
        bias: Whether the layer has biases.
        image_size: Height and width of the images; the grid of states has the same proportions.
    Shapes:
        states (B, S, C), row by row of a grid if shuffle > 1 -> (B, S / shuffle², D)
    Raises:
        UserError: The states do not form a grid, or its sides are not multiples of shuffle.
    """

    def __init__(
        self, *, context_dim: Count, dim: Count, shuffle: Count = 1, bias: bool = True, image_size: ImageSize = 1
    ) -> None:
        super().__init__()
        self.shuffle, self.image_size = shuffle, image_size
        self.fc = nn.Linear(context_dim * shuffle**2, dim, bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        if self.shuffle > 1:
            count = states.shape[1]
            grid = grid_of(count, self.image_size)
            if grid is None or any(side % self.shuffle for side in grid):
                raise UserError(
                    f"model.projector.shuffle: {count} states of an image are no grid whose sides are multiples of "
                    f"{self.shuffle}; set it to 1, or change data.image_size"
                )
            rows, columns = (side // self.shuffle for side in grid)
            cells = states.unflatten(1, (rows, self.shuffle, columns, self.shuffle))  # (B, rows, i, columns, j, C)
            states = cells.transpose(2, 3).flatten(3).flatten(1, 2)
        return self.fc(states)


class MLPProjector(nn.Module):
    """Two linear layers with an activation between them (LLaVA 1.5: Liu et al. 2024).

    Args:
        activation: See BlockConfig.
        others: See LinearProjector.
    Shapes:
        states (B, S, C) -> (B, S, D)
    """

    def __init__(
        self,
        *,
        context_dim: Count,
        dim: Count,
        activation: Literal["relu", "gelu", "gelu_tanh", "quick_gelu"] = "gelu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.fc1, self.fc2 = nn.Linear(context_dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(states)))


class ProjectedEncoder(nn.Module):
    """An image encoder followed by a projector to the decoder's width.

    Args:
        backbone: Images (B, 3, H, W) -> Context without masked states.
        projector: States of the backbone -> (B, S, D).
        dim: Width D.
        drop: Number of leading states to drop, such as a class token.
    Shapes:
        images (B, 3, H, W), normalised -> Context, states (B, S, D); (B, K, 3, H, W) of several -> (B, K * S, D)
    """

    def __init__(self, *, backbone: nn.Module, projector: nn.Module, dim: Count, drop: int = 0) -> None:
        super().__init__()
        self.backbone, self.projector, self.dim, self.drop = backbone, projector, dim, drop

    def forward(self, images: Tensor) -> Context:
        if images.ndim == 4:
            return self.project(self.features(images))
        states = self(images.flatten(0, 1)).states  # (B * K, S, D)
        return Context(states.unflatten(0, images.shape[:2]).flatten(1, 2))

    def features(self, images: Tensor) -> Tensor:
        """States of the backbone: images (B, 3, H, W) -> (B, S, C)."""
        return self.backbone(images).states[:, self.drop :]

    def project(self, features: Tensor) -> Context:
        return Context(self.projector(features))
