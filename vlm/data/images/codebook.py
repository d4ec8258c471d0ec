"""A codebook of image patches, learned by k-means: images become sequences of tokens, and tokens become images."""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vlm.errors import UserError
from vlm.nn.image_size import ImageSize, plain, sides
from vlm.randomness import numpy_rng

ITERATIONS = 10
MAX_PATCHES = 100_000  # patches that the codebook is learned from
CHUNK = 8192  # patches that are compared with all codes at once
MAX_CODES = 65_536


class PatchCodebook:
    """Vectors of pixels, the codes, of which the nearest one replaces each patch of an image (Lloyd 1982).

    A token is the index of a code; the tokens of an image are in row-major order. As in van den Oord et al. (2017), the
    codebook is learned before the model that writes tokens.

    Args:
        codes: Values from 0 to 255: rows of pixels, each with its channels.
        patch_size: Side of a patch in pixels.
        image_size: Height and width of the images, multiples of patch_size.
    Shapes:
        codes uint8 (K, patch_size² * 3)
    Raises:
        UserError: The sizes do not fit together.
    """

    def __init__(self, codes: Tensor, *, patch_size: int, image_size: ImageSize) -> None:
        check_patches(patch_size, image_size)
        if codes.dtype != torch.uint8 or codes.ndim != 2 or codes.shape[1] != 3 * patch_size**2 or not len(codes):
            raise UserError(f"the codebook's codes {tuple(codes.shape)} are not patches of {patch_size} pixels")
        self.codes, self.patch_size, self.image_size = codes, patch_size, sides(image_size)
        self._floats = codes.float()

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of rows and of columns of an image's tokens."""
        height, width = self.image_size
        return height // self.patch_size, width // self.patch_size

    @classmethod
    def fit(cls, images: Sequence[Tensor], *, num_codes: int, patch_size: int, seed: int) -> Self:
        """Learns the codes from images, uint8 (3, H, W) each.

        Most patches of drawings are background. Equal patches therefore count once, so that the codes are left for
        patches that differ. Images with fewer different patches than num_codes give one code per patch.
        """
        patches = torch.cat([split_patches(image[None], patch_size)[0] for image in images])
        rows = np.unique(patches.numpy().view([("", np.uint8)] * patches.shape[1]))  # sorted, as one value per patch
        patches = torch.from_numpy(rows.view(np.uint8).reshape(len(rows), -1))
        num_codes = min(num_codes, len(patches))
        rng = numpy_rng("codebook", seed)
        chosen = torch.from_numpy(rng.permutation(len(patches))[:MAX_PATCHES])
        patches = patches[chosen].float()  # in random order, so that the first ones are a sample
        codes = patches[:num_codes].clone()
        for _ in range(ITERATIONS):
            nearest = find_nearest(patches, codes)
            counts = torch.bincount(nearest, minlength=num_codes)
            sums = torch.zeros_like(codes).index_add_(0, nearest, patches)
            # A code without patches takes the place of a random one, which splits a group.
            spare = patches[torch.from_numpy(rng.integers(len(patches), size=num_codes))]
            codes = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], spare)
        height, width = images[0].shape[1:]
        return cls(codes.round().to(torch.uint8), patch_size=patch_size, image_size=(height, width))

    def encode(self, images: Tensor) -> Tensor:
        """The tokens of images: uint8 (B, 3, H, W) -> int64 (B, L)."""
        patches = split_patches(images, self.patch_size)  # (B, L, P)
        different, places = torch.unique(patches.flatten(0, 1), dim=0, return_inverse=True)  # most are background
        return find_nearest(different.float(), self._floats.to(images.device))[places].view(patches.shape[:2])

    def decode(self, tokens: Tensor) -> Tensor:
        """The images of tokens: int64 (B, L) -> uint8 (B, 3, H, W)."""
        rows, columns = self.grid
        size = self.patch_size
        patches = self.codes.to(tokens.device)[tokens]  # (B, L, size * size * 3)
        cells = patches.view(-1, rows, columns, size, size, 3)
        return cells.permute(0, 5, 1, 3, 2, 4).reshape(len(tokens), 3, rows * size, columns * size)

    def state(self) -> dict[str, Any]:
        """The arguments, for a checkpoint; the codes are base64."""
        codes = b64encode(self.codes.numpy().tobytes()).decode()
        return {"codes": codes, "patch_size": self.patch_size, "image_size": plain(self.image_size)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restores the codebook from its `state`.

        Raises:
            UserError: The state is invalid.
        """
        try:
            size, values = int(state["patch_size"]), np.frombuffer(b64decode(state["codes"], validate=True), np.uint8)
            codes = torch.from_numpy(values.reshape(-1, 3 * size**2).copy())
            return cls(codes, patch_size=size, image_size=state["image_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the stored codebook is invalid ({error}); the file may be damaged") from error


def check_patches(patch_size: int, image_size: ImageSize) -> None:
    """Checks that images consist of whole patches.

    Raises:
        UserError: They do not.
    """
    if patch_size < 1 or any(side % patch_size for side in sides(image_size)):
        raise UserError(
            f"task.fields.images.patch_size: {patch_size} does not divide the sides of images of "
            f"{plain(sides(image_size))} pixels; change it, or data.image_size"
        )


def split_patches(images: Tensor, size: int) -> Tensor:
    """Cuts images into squares, row by row: (B, 3, H, W) -> (B, L, size * size * 3)."""
    cells = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # (B, 3, rows, size, columns, size)
    return cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def find_nearest(patches: Tensor, codes: Tensor) -> Tensor:
    """Index of the nearest code of each patch: (N, P), (K, P) -> (N,); of equally near ones, the first."""
    halves = codes.square().sum(1) / 2
    chunks = [torch.addmm(halves, part, codes.T, alpha=-1).argmin(1) for part in patches.split(CHUNK)]
    return torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.long, device=patches.device)
