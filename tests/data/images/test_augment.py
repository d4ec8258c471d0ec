"""Augmentation: keyed whoever draws, off by default, torchvision's own operations, true to its bounds."""

import importlib.util
import multiprocessing
import random
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from vlm.config.build import build, check
from vlm.data.images import class_augment as batched
from vlm.data.images import class_augment as class_transforms
from vlm.data.images.augment import Augment
from vlm.data.images.class_augment import POLICIES, ClassAugment
from vlm.data.images.image import Preprocess
from vlm.data.images.resize import to_tensor
from vlm.errors import UserError
from vlm.randomness import key

KEY = (0, 3, 17)


def noise(width=40, height=30, seed=0):
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
    assert torch.equal(Augment(**geometry)(image, KEY), Preprocess(**geometry)(image))


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


def everything(policy="randaugment"):
    crop = {"min_scale": 0.3, "min_ratio": 0.75, "horizontal_flip": True, "color_jitter": 0.2}
    return ClassAugment(image_size=32, policy=policy, erase=0.5, pad_crop=3, **crop)


def test_what_augment_has_stays_as_it_draws():
    options = {"image_size": 32, "min_scale": 0.3, "min_ratio": 0.75, "horizontal_flip": True, "color_jitter": 0.2}
    for at in [(0, 0, index) for index in range(10)]:
        assert torch.equal(ClassAugment(**options)(noise(), at), Augment(**options)(noise(), at))


def _augment_at(at):
    policy, index = at
    return everything(policy)(noise(), (0, 1, index)).numpy()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_key_alone_decides_in_whatever_process_and_order(policy):
    keys = [(policy, index) for index in range(8)]
    here = [_augment_at(at) for at in keys]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        there = pool.map(_augment_at, keys[::-1])[::-1]
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))
    assert len({array.tobytes() for array in here}) == len(keys)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_generator_is_touched(policy):
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    everything(policy)(noise(), KEY)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_the_generator_comes_back_after_a_fault():
    augment = everything()

    def fail(image):
        torch.rand(3)
        raise ValueError("broken")

    augment._operate = fail
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="broken"):
        augment(noise(), KEY)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_policy_is_torchvisions():
    from torchvision.transforms import v2

    truth = v2.RandAugment(3, 20, interpolation=v2.InterpolationMode.BILINEAR, fill=[128, 128, 128])
    augment = ClassAugment(image_size=32, policy="randaugment", num_ops=3, magnitude=20)
    for index in range(20):
        torch.manual_seed(key("policy", 0, 0, index))
        expected = to_tensor(truth(ClassAugment(image_size=32).augment_image(noise(), (0, 0, index))))
        assert torch.equal(augment(noise(), (0, 0, index)), expected)


@pytest.mark.sample(plain=1, slow=1)
@pytest.mark.parametrize("pad", [1, 4])
def test_pad_crop_is_torchvisions_random_crop(pad):
    """Every result is a crop of the padded image, every crop occurs, and about as often as any other."""
    padded = torch.nn.functional.pad(Preprocess(image_size=16)(noise()), [pad] * 4)
    offsets = range(2 * pad + 1)
    crops = [padded[:, y : y + 16, x : x + 16].numpy().tobytes() for x in offsets for y in offsets]
    augment = ClassAugment(image_size=16, pad_crop=pad)
    drawn = Counter(augment(noise(), (0, 0, index)).numpy().tobytes() for index in range(len(crops) * 20))
    assert drawn.keys() == set(crops) and max(drawn.values()) < 50


def test_erasing_keeps_to_its_bounds():
    black = Image.new("RGB", (64, 64))
    augment = ClassAugment(image_size=64, erase=0.6)
    areas, ratios = [], []
    for index in range(400):
        pixels = augment(black, (0, 0, index))
        rows, columns = (pixels.amax(0) > 0).nonzero().unbind(1)
        if not len(rows):
            continue
        height, width = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
        inside = pixels[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].float()
        assert abs(inside.mean() - 127.5) < 25
        areas.append(height * width / 64**2)
        ratios.append(height / width)
    assert 0.5 < len(areas) / 400 < 0.7
    assert 0.015 < min(areas) < 0.05 and 0.28 < max(areas) < 0.36
    assert 0.25 < min(ratios) < 0.4 < 2.5 < max(ratios) < 4
    assert abs(np.log(ratios).mean()) < 0.12  # tall and wide alike


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_tiniest_images_survive(size):
    for index in range(20):
        augment = ClassAugment(image_size=size, policy="trivialaugment", erase=1)
        assert augment(noise(), (0, 0, index)).shape == (3, size, size)


OF_BOTH = {"min_scale": [0, 1.1], "min_ratio": [-1], "color_jitter": [1, float("nan")], "image_size": [0]}
OF_BOTH |= {"resize": ["zoom"]}
OF_CLASSES = {
    "policy": ["randaug"],
    "num_ops": [0],
    "magnitude": [31],
    "erase": [1.5, float("nan")],
    "pad_crop": [-1, 32],
}
KINDS = {"augment.Augment": OF_BOTH, "class_augment.ClassAugment": OF_CLASSES}
KNOWN = {"resize": "crop, crop_down, squash, pad", "policy": "choose one of randaugment"}
FAULTS = [(kind, name, value) for kind, own in KINDS.items() for name, values in own.items() for value in values]


@pytest.mark.parametrize(("kind", "name", "value"), FAULTS)
def test_wrong_arguments_are_named(kind, name, value):
    node = {"_target_": f"vlm.data.images.{kind}", "image_size": 32, name: value}
    with pytest.raises(UserError, match=KNOWN.get(name, name)):
        check({"augment": node})
        build(node, "augment")


def test_torchvision_loads_only_for_a_policy(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it were not installed
    spec = importlib.util.spec_from_file_location("loaded_anew", class_transforms.__file__)
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    anew.ClassAugment(image_size=8, erase=0.5)
    with pytest.raises(ImportError, match="torchvision"):
        anew.ClassAugment(image_size=8, policy="randaugment")


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


def augment_both_ways(augment, images):
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
    alone, together, _ = augment_both_ways(ClassAugment(image_size=SIDE, **options), pictures())
    assert torch.equal(alone, together)


def test_light_is_the_same_to_a_level():
    alone, together, _ = augment_both_ways(Augment(image_size=SIDE, color_jitter=0.4), pictures())
    assert (alone.int() - together).abs().max() <= 1 and alone.ne(together).float().mean() < 0.01


@pytest.mark.parametrize("resize", ["crop", "squash"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("size", "shape"), [((24, 24), SIDE), ((50, 37), SIDE), ((15, 20), SIDE), ((50, 37), (16, 40))]
)
def test_crops_are_pillows_to_a_level(size, shape, interpolation, resize, monkeypatch):
    options = {"min_scale": 0.2, "min_ratio": 0.5, "interpolation": interpolation, "resize": resize}
    augment, images = Augment(image_size=shape, horizontal_flip=True, **options), pictures(*size)
    alone, together, numbers = augment_both_ways(augment, images)
    # Each result is rounded after both passes, and a cubic filter passes on 1.3 of the first error: by 1.2 at most.
    assert (alone.int() - together).abs().max() <= 2
    monkeypatch.setattr(Image.Image, "resize", width_first)
    alone, together, _ = augment_both_ways(augment, images)
    assert (alone.int() - together).abs().max() <= 1 and alone.ne(together).float().mean() < 0.05
    assert len({tuple(row) for row in numbers[:, :4].tolist()}) == len(KEYS)


def test_rectangles_are_the_same_and_filled_with_noise():
    alone, together, numbers = augment_both_ways(ClassAugment(image_size=SIDE, erase=0.8), pictures())
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
    _, together, numbers = augment_both_ways(augment, pictures())
    images = torch.stack([to_tensor(image) for image in pictures()])
    order = torch.randperm(len(KEYS))
    assert torch.equal(batched.apply_params(images[order], numbers[order], augment), together[order])
    one = batched.apply_params(images[3:4], numbers[3:4], augment)
    assert torch.equal(one, together[3:4])


@pytest.mark.gpu
def test_a_gpu_makes_the_same():
    augment = ClassAugment(image_size=SIDE, erase=0.5, pad_crop=3, horizontal_flip=True)
    _, together, numbers = augment_both_ways(augment, pictures())
    images = torch.stack([to_tensor(image) for image in pictures()])
    assert torch.equal(batched.apply_params(images.cuda(), numbers.cuda(), augment).cpu(), together)
