"""The field that reads images as tokens of a learned codebook."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from vlm.data.batch import Tensors
from vlm.data.fields import AugmentKey, ImageField
from vlm.data.images.augment import Augment
from vlm.data.images.codebook import MAX_CODES, PatchCodebook, check_patches
from vlm.data.images.image import ImageError, Preprocess
from vlm.data.records import Record, Source, Split
from vlm.errors import Count, Range, UserError


@dataclass
class ImageTokens(Tensors):
    """Images as tokens.

    Args:
        pixels: The images themselves, in evaluation; None in training.
    Shapes:
        tokens (B, L), pixels uint8 (B, 3, H, W) or None
    """

    tokens: Tensor
    pixels: Tensor | None = None


class ImageTokenField(ImageField):
    """The image of a record as tokens of a `PatchCodebook`, which is learned from training images.

    Args:
        preprocess: Preprocessing of the images; pixels are not normalised.
        patch_size: Side of a patch in pixels, which must divide the images' sides.
        num_codes: Maximum number of codes; the codebook has fewer if there are fewer different patches.
        codebook_images: Number of training images that the codebook is learned from, evenly spread over the split.
        augment: None, because pictures are learned as they are.
        cache_images: As in ImageField.
    Shapes:
        ImageTokens of tokens (B, L)
    Raises:
        UserError: The patches do not fit into the images, or images are to be augmented.
    """

    codebook: PatchCodebook | None = None

    def __init__(
        self,
        *,
        preprocess: Preprocess,
        patch_size: Count = 8,
        num_codes: Annotated[int, Range(2, MAX_CODES)] = 4096,
        codebook_images: Count = 6000,
        augment: Augment | None = None,
        cache_images: bool = False,
    ) -> None:
        if augment is not None:
            raise UserError("data.augment: is not supported for images that become tokens; set it to null")
        check_patches(patch_size, preprocess.image_size)
        super().__init__(preprocess=preprocess, cache_images=cache_images)
        self.patch_size, self.num_codes, self.codebook_images = patch_size, num_codes, codebook_images

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        self._train, self._seed = splits["train"], seed

    def prepare(self) -> None:
        """Learns the codebook from training images; it depends only on them and the seed of the data's order.

        Raises:
            UserError: None of the images can be read.
        """
        count = len(self._train)
        chosen = [count * at // min(self.codebook_images, count) for at in range(min(self.codebook_images, count))]
        images, reasons = list[Tensor](), list[str]()
        for index in chosen:
            try:
                images.append(self.preprocess(self._train.record(index).image()))
            except ImageError as fault:
                reasons.append(str(fault))
        if not images:
            raise UserError(f"data: none of {count} images for the codebook can be read: {reasons[0]}")
        self.codebook = PatchCodebook.fit(images, num_codes=self.num_codes, patch_size=self.patch_size, seed=self._seed)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "codebook": self.learned.state()}

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.codebook = PatchCodebook.from_state(about["codebook"])

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_codes": len(self.learned)}

    @property
    def learned(self) -> PatchCodebook:
        """The codebook, once it is learned or restored."""
        assert self.codebook is not None, "the codebook is not learned yet"
        return self.codebook

    def encode(self, record: Record, key: AugmentKey | None) -> ImageTokens:  # type: ignore[override]
        pixels = self.preprocess(record.image())[None]
        return ImageTokens(self.learned.encode(pixels), pixels if key is None else None)

    def collate(self, values: Sequence[ImageTokens]) -> ImageTokens:  # type: ignore[override]
        rows, columns = self.learned.grid
        tokens = torch.cat([torch.empty(0, rows * columns, dtype=torch.long), *(value.tokens for value in values)])
        pixels = [value.pixels for value in values if value.pixels is not None]
        return ImageTokens(tokens, torch.cat(pixels) if pixels else None)
