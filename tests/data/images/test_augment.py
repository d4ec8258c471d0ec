"""Augmentation: keyed, off by default, and true to its bounds."""

import numpy as np
import pytest
import torch
from PIL import Image

from vlm.data.images.augment import Augment
from vlm.data.images.image import Preprocess


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def coordinates(width=200, height=100):
    """An image that says where each pixel stands: red is x, green is y."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([x, y, np.full_like(x, 77)], -1).astype(np.uint8))


@pytest.mark.parametrize("resize", ["crop", "squash", "pad"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(90, 60), (60, 90), (1, 1), (500, 2)])
def test_all_off_is_preprocess(resize, interpolation, size):
    geometry = {"image_size": 32, "resize": resize, "interpolation": interpolation}
    image = noise(*size)
    assert torch.equal(Augment(**geometry)(image, (0, 3, 17)), Preprocess(**geometry)(image))


@pytest.mark.parametrize("resize", ["crop", "squash", "pad"])
@pytest.mark.parametrize("size", [(90, 60), (1, 1), (3, 700)])
@pytest.mark.parametrize("shape", [(32, 32), (16, 40)])
def test_the_result_is_uint8_and_of_its_size(resize, size, shape):
    augment = Augment(
        image_size=shape, min_scale=0.3, min_ratio=0.6, horizontal_flip=True, color_jitter=0.4, resize=resize
    )
    for index in range(10):
        tensor = augment(noise(*size), (0, 0, index))
        assert (tensor.shape, tensor.dtype) == ((3, *shape), torch.uint8) and tensor.is_contiguous()


@pytest.mark.parametrize(
    ("resize", "shape", "base"),
    [("crop", (50, 50), (100, 100)), ("squash", (50, 50), (200, 100)), ("crop", (60, 40), (100 * 2 / 3, 100))],
)
def test_crops_keep_to_their_bounds_and_use_them(resize, shape, base):
    """In the area of the largest rectangle of the shape for a crop, else of the whole image."""
    augment = Augment(image_size=shape, resize=resize, min_scale=0.25, min_ratio=0.5, interpolation="bilinear")
    image = coordinates()
    areas, ratios, centers = [], [], []
    for index in range(300):
        x, y, blue = augment(image, (0, 0, index)).float()
        assert (blue == 77).all()
        # Differences between the outermost columns and rows, which lie a pixel less than the region apart.
        width = (x[:, -1] - x[:, 0]).mean() / (1 - 1 / shape[1])
        height = (y[-1] - y[0]).mean() / (1 - 1 / shape[0])
        areas.append(float(width * height / (base[0] * base[1])))
        ratios.append(float(width / base[0] / (height / base[1])))
        centers.append(float(x.mean()))
    assert 0.22 < min(areas) < 0.35 and 0.8 < max(areas) < 1.03
    assert 0.48 < min(ratios) < 0.6 and 1.7 < max(ratios) < 2.1
    assert abs(np.log(ratios).mean()) < 0.06  # wide and tall alike
    assert min(centers) < 75 and max(centers) > 125


def test_pad_keeps_proportions_when_it_crops():
    augment = Augment(image_size=64, resize="pad", min_scale=0.5)
    for index in range(20):
        x, y, blue = augment(coordinates(), (0, 0, index)).float()
        rows = (blue[:, 32] == 77).nonzero().flatten()
        assert len(rows) == 32  # 2 to 1, as the image itself
        shown_x, shown_y = x[32, -3] - x[32, 2], y[rows[-3], 32] - y[rows[2], 32]
        assert float(shown_x / 59) == pytest.approx(float(shown_y / 27), rel=0.1)


def test_flip_mirrors_half_of_the_images():
    image, augment = noise(32, 32), Augment(image_size=32, horizontal_flip=True)
    plain = Preprocess(image_size=32)(image)
    tensors = [augment(image, (0, 0, index)) for index in range(200)]
    flips = sum(torch.equal(tensor, plain.flip(2)) for tensor in tensors)
    assert 75 < flips < 125 and flips + sum(torch.equal(tensor, plain) for tensor in tensors) == 200


def test_jitter_changes_light_by_its_factors():
    """On an image of two greys, their sum moves with brightness, their difference with brightness times contrast."""
    array = np.full((32, 32, 3), 90, np.uint8)
    array[:, 16:] = 110
    augment = Augment(image_size=32, color_jitter=0.3)
    brightness, contrast = [], []
    for index in range(300):
        tensor = augment(Image.fromarray(array), (0, 0, index)).float()
        dark, light = tensor[0, 0, 0].item(), tensor[0, 0, -1].item()
        assert tensor.unique().numel() <= 2
        brightness.append((dark + light) / 200)
        contrast.append((light - dark) / 20 / brightness[-1])
    for values, slack in ((brightness, 0.01), (contrast, 0.08)):
        assert 0.7 - slack <= min(values) < 0.75 + slack
        assert 1.25 - slack < max(values) <= 1.3 + slack
        assert np.mean(values) == pytest.approx(1, abs=0.04)


def test_jitter_clips_and_does_not_wrap():
    array = np.zeros((8, 8, 3), np.uint8)
    array[:, 4:] = 255
    for index in range(30):
        tensor = Augment(image_size=8, color_jitter=0.9)(Image.fromarray(array), (0, 0, index))
        assert (tensor[:, :, 4:] >= tensor[:, :, :4]).all()


def test_one_augmentation_does_not_change_what_another_draws():
    image = noise(90, 60)
    crop, both = (Augment(image_size=32, min_scale=0.3, horizontal_flip=flip) for flip in (False, True))
    for index in range(20):
        alone, tensor = crop(image, (0, 0, index)), both(image, (0, 0, index))
        assert torch.equal(tensor, alone) or torch.equal(tensor, alone.flip(2))
