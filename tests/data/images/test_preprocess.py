"""The preprocessing against torchvision's, on tensors and on PIL images."""

from fractions import Fraction
from io import BytesIO
from math import floor

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import pil_to_tensor
from torchvision.transforms.v2 import CenterCrop, Compose, Normalize, Resize
from transformers import CLIPImageProcessor

from vlm.data.images.image import Preprocess
from vlm.errors import UserError

BICUBIC = InterpolationMode.BICUBIC


def noise(width, height, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_tiny_and_thin_images():
    for size in ((1, 1), (10_000, 1), (1, 10_000), (65_536, 2)):
        for resize in ("crop", "squash", "pad"):
            tensor = Preprocess(image_size=224, resize=resize)(Image.new("RGB", size, (9, 8, 7)))
            assert tensor.shape == (3, 224, 224)
            if resize != "pad":
                assert (tensor == torch.tensor([9, 8, 7])[:, None, None]).all()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(
    "size", [(500, 375), (375, 500), (333, 333), (640, 427), (101, 100), (50, 31), (20, 20), (64, 64), (64, 91)]
)
def test_crop_is_torchvisions_resize_and_center_crop(size, interpolation):
    image = Image.fromarray(noise(*size, seed=sum(size)))
    both = Compose([Resize(64, InterpolationMode(interpolation), antialias=True), CenterCrop(64)])
    ours = Preprocess(image_size=64, interpolation=interpolation)(image)
    if interpolation == "lanczos":  # which torchvision has for PIL images alone
        assert gap(ours, both(image)) <= 1  # PIL keeps the corners of a region in single precision
    else:
        assert torch.equal(ours, both(pil_to_tensor(image)))
        assert gap(ours, both(image)) <= 2  # on noise: the two round what comes of the first of two passes otherwise


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(51, 36), (36, 51), (500, 375)])
def test_a_crop_down_is_that_of_transformers(size, interpolation):
    """Of a difference of 15 pixels it cuts 7 in front, torchvision 8."""
    image, side = Image.fromarray(noise(*size)), {"height": 36, "width": 36}
    kept = {"do_rescale": False, "do_normalize": False, "resample": Image.Resampling[interpolation.upper()]}
    processor = CLIPImageProcessor(size={"shortest_edge": 36}, crop_size=side, **kept)
    truth = processor(image, return_tensors="pt").pixel_values[0]
    preprocess = Preprocess(image_size=36, resize="crop_down", interpolation=interpolation)
    assert torch.equal(preprocess(image), truth)
    other = Preprocess(image_size=36, interpolation=interpolation)
    assert torch.equal(other(image), truth) != (51 in size)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(500, 375), (375, 500), (101, 30), (30, 400), (97, 33), (96, 32), (900, 31)])
@pytest.mark.parametrize("shape", [(32, 96), (50, 20), (64, 64)])
def test_rectangles_are_those_of_torchvision_and_pillow(size, shape, interpolation):
    """Crops cover the rectangle and cut its centre out, stretched ones are resized to it, and padded ones fit in."""
    image, (height, width) = Image.fromarray(noise(*size)), shape
    ratio = max(Fraction(height, size[1]), Fraction(width, size[0]))
    covering = [floor(ratio * size[1]), floor(ratio * size[0])]
    pixels, options = pil_to_tensor(image), {"image_size": [*shape], "interpolation": interpolation}
    resized = Resize(covering, InterpolationMode(interpolation), antialias=True)
    if max(covering[0] / height, covering[1] / width) <= 8:
        assert torch.equal(Preprocess(**options)(image), CenterCrop(shape)(resized(pixels)))
    else:  # only what is kept is resized, by Pillow
        assert Preprocess(**options)(image).shape == (3, *shape)
    stretched = Resize(shape, InterpolationMode(interpolation), antialias=True)(pixels)
    assert torch.equal(Preprocess(**options, resize="squash")(image), stretched)
    fitted = ImageOps.contain(image, (width, height), Image.Resampling[interpolation.upper()])
    padded = Preprocess(**options, resize="pad")(image)
    top, left = (height - fitted.height) // 2, (width - fitted.width) // 2
    inside = padded[:, top : top + fitted.height, left : left + fitted.width]
    assert torch.equal(inside, pil_to_tensor(fitted))
    inside.fill_(128)
    assert (padded == 128).all()


def gap(ours, truth):
    """The greatest difference in grey levels."""
    return np.abs(ours.permute(1, 2, 0).numpy().astype(int) - np.asarray(truth)).max()


def test_normalize_is_torchvisions_and_leaves_its_argument_alone():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    images = torch.from_numpy(noise(8, 6)).permute(2, 0, 1)[None].repeat(2, 1, 1, 1)
    ours = Preprocess(image_size=8, mean=mean, std=std).normalize(images)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, Normalize(mean, std)(images.float() / 255), rtol=0, atol=0)
    floats = torch.full((1, 3, 2, 2), 255.0)
    assert Preprocess(image_size=2).normalize(floats).unique().tolist() == [1.0]
    assert floats.unique().tolist() == [255.0]


def test_the_state_is_plain_and_gives_the_same_preprocessing():
    first = Preprocess(image_size=24, resize="pad", mean=(0.1, 0.2, 0.3), std=(1, 2, 3), interpolation="bilinear")
    torch.save(first.state(), file := BytesIO())
    second = Preprocess.from_state(torch.load(BytesIO(file.getvalue()), weights_only=True))
    image = Image.fromarray(noise(50, 40))
    assert torch.equal(first.normalize(first(image)[None]), second.normalize(second(image)[None]))
    assert first.state() == second.state()


WRONG = [("image_size", value) for value in (0, 10**9, "64", [64, 0], [64, 64, 3])]
WRONG += [("resize", "stretch"), ("interpolation", "cubic"), ("std", (0.5, 0.5, 0)), ("size", 3)]
WRONG += [("mean", value) for value in ((0.5, 0.5), "grey", (0.5, 0.5, float("nan")))]
KNOWN = {"resize": "crop, crop_down, squash, pad", "interpolation": "bicubic"}


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_arguments_are_named(name, value):
    with pytest.raises(UserError, match=KNOWN.get(name, name)):
        Preprocess.from_state({"image_size": 64, name: value})


def test_images_of_any_mode_are_preprocessed():
    grey = Image.fromarray(noise(20, 20, 1))
    assert torch.equal(Preprocess(image_size=8)(grey), Preprocess(image_size=8)(grey.convert("RGB")))
