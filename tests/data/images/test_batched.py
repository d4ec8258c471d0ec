"""Augmentation of batches against that of one image after the other, by the same keys."""

import numpy as np
import pytest
import torch
from PIL import Image

from vlm.data.images import class_augment as batched
from vlm.data.images.augment import Augment
from vlm.data.images.class_augment import ClassAugment
from vlm.data.images.resize import to_tensor

SIDE = 24
KEYS = [(7, 2, index) for index in range(40)]


def pictures(width=SIDE, height=SIDE):
    """Smooth pictures with some noise, as photos are."""
    made = []
    for seed in range(len(KEYS)):
        rng = np.random.default_rng(seed)
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize((width, height))
        noisy = np.asarray(coarse).astype(int) + rng.integers(-9, 10, (height, width, 3))
        made.append(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)))
    return made


def both(augment, images):
    """Each image by itself, and all as a batch."""
    alone = torch.stack([augment(image, key) for image, key in zip(images, KEYS, strict=True)])
    numbers = torch.stack(
        [batched.encode_params(augment, image.size, key) for image, key in zip(images, KEYS, strict=True)]
    )
    together = batched.apply_params(torch.stack([to_tensor(image) for image in images]), numbers, augment)
    assert together.dtype == torch.uint8 and together.shape == alone.shape
    return alone, together, numbers


def width_first(image, size, resample=None, box=None, plain=Image.Image.resize):
    """Pillow's resize with the order of passes that ours has; from version 13 on, the sizes decide on Pillow's."""
    left, top, right, bottom = box or (0, 0, *image.size)
    across = plain(image, (size[0], image.height), resample, (left, 0, right, image.height))
    return plain(across, size, resample, (0, top, size[0], bottom))


@pytest.mark.parametrize(
    "options", [{}, {"horizontal_flip": True}, {"pad_crop": 5}, {"pad_crop": 2, "color_jitter": 0}]
)
def test_flips_and_shifts_are_the_same(options):
    alone, together, _ = both(ClassAugment(image_size=SIDE, **options), pictures())
    assert torch.equal(alone, together)


def test_light_is_the_same_to_a_level():
    alone, together, _ = both(Augment(image_size=SIDE, color_jitter=0.4), pictures())
    assert (alone.int() - together).abs().max() <= 1 and alone.ne(together).float().mean() < 0.01


@pytest.mark.parametrize("resize", ["crop", "squash"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("size", "shape"), [((24, 24), SIDE), ((50, 37), SIDE), ((15, 20), SIDE), ((50, 37), (16, 40))]
)
def test_crops_are_pillows_to_a_level(size, shape, interpolation, resize, monkeypatch):
    options = {"min_scale": 0.2, "min_ratio": 0.5, "interpolation": interpolation, "resize": resize}
    augment, images = Augment(image_size=shape, horizontal_flip=True, **options), pictures(*size)
    alone, together, numbers = both(augment, images)
    # Each result is rounded after both passes, and a cubic filter passes on 1.3 of the first error: by 1.2 at most.
    assert (alone.int() - together).abs().max() <= 2
    monkeypatch.setattr(Image.Image, "resize", width_first)
    alone, together, _ = both(augment, images)
    assert (alone.int() - together).abs().max() <= 1 and alone.ne(together).float().mean() < 0.05
    assert len({tuple(row) for row in numbers[:, :4].tolist()}) == len(KEYS)


def test_rectangles_are_the_same_and_filled_with_noise():
    alone, together, numbers = both(ClassAugment(image_size=SIDE, erase=0.8), pictures())
    filled = []
    for place, (top, left, height, width) in enumerate(numbers[:, 9:13].int().tolist()):
        part = (slice(None), slice(top, top + height), slice(left, left + width))
        filled.append(together[place][part].flatten())
        together[place][part] = alone[place][part]
    assert torch.equal(alone, together)
    values = torch.cat(filled).float()
    assert sum(map(len, filled)) > 3000 and 20 < sum(len(part) > 0 for part in filled) < 40
    assert values.mean() == pytest.approx(127.5, abs=4) and values.std() == pytest.approx(73.9, abs=3)
    assert len(values.unique()) == 256


def test_a_key_draws_the_same_whatever_is_beside_it():
    augment = ClassAugment(image_size=SIDE, erase=1.0, pad_crop=3, color_jitter=0.3, min_scale=0.5)
    _, together, numbers = both(augment, pictures())
    images = torch.stack([to_tensor(image) for image in pictures()])
    order = torch.randperm(len(KEYS))
    assert torch.equal(batched.apply_params(images[order], numbers[order], augment), together[order])
    one = batched.apply_params(images[3:4], numbers[3:4], augment)
    assert torch.equal(one, together[3:4])


@pytest.mark.gpu
def test_a_gpu_makes_the_same():
    augment = ClassAugment(image_size=SIDE, erase=0.5, pad_crop=3, horizontal_flip=True)
    _, together, numbers = both(augment, pictures())
    images = torch.stack([to_tensor(image) for image in pictures()])
    assert torch.equal(batched.apply_params(images.cuda(), numbers.cuda(), augment).cpu(), together)
