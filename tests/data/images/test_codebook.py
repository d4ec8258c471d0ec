"""Codebooks of patches, compared with brute force and with Lloyd's algorithm written out."""

import numpy as np
import pytest
import torch

from vlm.data.images import codebook as module
from vlm.data.images.codebook import PatchCodebook, find_nearest, split_patches
from vlm.errors import UserError
from vlm.randomness import numpy_rng


def random_images(count: int, height: int = 8, width: int = 12, levels: int = 3) -> list[torch.Tensor]:
    values = torch.from_numpy(numpy_rng("images", count).integers(0, levels, (count, 3, height, width)))
    return list((values * 100).to(torch.uint8))


def cut(image: torch.Tensor, size: int) -> list[torch.Tensor]:
    """The patches of an image, row by row, each with its channels last."""
    height, width = image.shape[1:]
    return [
        image[:, top : top + size, left : left + size].permute(1, 2, 0).flatten()
        for top in range(0, height, size)
        for left in range(0, width, size)
    ]


def test_patches_are_cut_row_by_row() -> None:
    images = torch.stack(random_images(2))
    expected = torch.stack([torch.stack(cut(image, 4)) for image in images])
    assert torch.equal(split_patches(images, 4), expected) and expected.shape == (2, 6, 48)


def test_with_a_code_for_each_patch_images_are_rebuilt_exactly() -> None:
    images = random_images(5)
    made = PatchCodebook.fit(images, num_codes=1000, patch_size=4, seed=0)
    different = {tuple(patch.tolist()) for image in images for patch in cut(image, 4)}
    assert len(made) == len(different) and {tuple(code.tolist()) for code in made.codes} == different
    tokens = made.encode(torch.stack(images))
    assert tokens.shape == (5, 6) and made.grid == (2, 3)
    assert torch.equal(made.decode(tokens), torch.stack(images))


def test_codes_are_those_of_lloyds_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)
    images = random_images(12, levels=256)
    made = PatchCodebook.fit(images, num_codes=5, patch_size=4, seed=3)
    patches = np.unique(np.array([patch.tolist() for image in images for patch in cut(image, 4)]), axis=0)
    rng = numpy_rng("codebook", 3)
    patches = patches[rng.permutation(len(patches))].astype(float)
    codes = patches[:5].copy()
    for _ in range(module.ITERATIONS):
        nearest = ((patches[:, None] - codes) ** 2).sum(-1).argmin(1)
        codes = np.array([patches[nearest == code].mean(0) for code in range(5)])
    assert np.abs(made.codes.numpy() - codes).max() <= 0.51  # rounded
    errors = np.array([((patches - code) ** 2).sum(-1) for code in made.codes.numpy().astype(float)]).min(0)
    first = ((patches[:, None] - patches[:5]) ** 2).sum(-1).min(1)
    assert errors.sum() < first.sum()


def test_the_nearest_code_is_found_and_of_equal_ones_the_first() -> None:
    patches = torch.rand(50, 12, generator=torch.Generator().manual_seed(0)) * 255
    codes = torch.cat([patches[:9] + 1, patches[:9] + 1])
    assert torch.equal(find_nearest(patches, codes), torch.cdist(patches, codes[:9]).argmin(1))
    assert find_nearest(patches[:0], codes).shape == (0,)


def test_the_same_images_and_seed_give_the_same_codes() -> None:
    images = random_images(12, levels=256)
    first, again, other = (PatchCodebook.fit(images, num_codes=6, patch_size=4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.codes, again.codes) and not torch.equal(first.codes, other.codes)


def test_a_codebook_is_restored_from_its_state() -> None:
    made = PatchCodebook.fit(random_images(3), num_codes=4, patch_size=4, seed=0)
    again = PatchCodebook.from_state(made.state())
    assert torch.equal(again.codes, made.codes) and again.grid == made.grid
    for change, message in (
        ({"image_size": 10}, "patch_size: 4 does not divide the sides of images of 10 pixels"),
        ({"patch_size": 0}, "the stored codebook is invalid"),
        ({"codes": made.state()["codes"][:8]}, "the stored codebook is invalid"),
        ({"codes": "?"}, "the stored codebook is invalid"),
        ({"codes": [[1]]}, "the stored codebook is invalid"),
        ({"codes": ""}, "are not patches of 4 pixels"),
        ({"image_size": [8]}, "the stored codebook is invalid"),
    ):
        with pytest.raises(UserError, match=message):
            PatchCodebook.from_state(made.state() | change)
    with pytest.raises(UserError, match=r"codes \(4, 48\) are not patches of 2 pixels"):
        PatchCodebook(made.codes, patch_size=2, image_size=8)
