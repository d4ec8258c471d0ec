"""Colours, orientation and transparency of single formats; tests/reliability/test_images.py has files of all kinds."""

import os
import pickle
import struct
import subprocess
import sys
import zlib
from fractions import Fraction
from io import BytesIO
from math import floor

import numpy as np
import odd_images
import pytest
import torch
from odd_images import encode
from PIL import Image, ImageCms, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import pil_to_tensor
from torchvision.transforms.v2 import CenterCrop, Compose, Normalize, Resize
from transformers import CLIPImageProcessor

from vlm.data.images.image import ImageError, Preprocess, load_image
from vlm.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # pytest resets the filter that vlm.data.images.image sets


def png(width, height, bit_depth, color_type, rows, *chunks):
    return odd_images.png(width, height, bit_depth, color_type, zlib.compress(rows), *chunks)


def noise(width, height, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def smooth(width, height, seed=0):
    """A picture with structure at several scales, as a photo has."""
    return Image.fromarray(noise(9, 7, seed=seed)).resize((width, height), Image.Resampling.BICUBIC)


def pixels(source):
    image = load_image(source)
    assert image.mode == "RGB" and not image.info and type(image) is Image.Image
    return np.asarray(image)


def test_a_jpeg_decodes_to_the_same_pixels_as_its_lossless_copy():
    data = encode(smooth(640, 480), "JPEG", quality=90)
    copy = encode(Image.open(BytesIO(data)), "PNG")
    preprocess = Preprocess(image_size=32)
    assert torch.equal(preprocess(load_image(data)), preprocess(load_image(copy)))


# The eight EXIF orientations, as what a viewer does with the stored pixels (Exif 2.32, table of tag 274).
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a.swapaxes(0, 1), 2),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation(orientation, format):
    image = smooth(40, 24)
    data = encode(image, format, exif=odd_images.exif(orientation), **{"lossless": True} if format == "WEBP" else {})
    stored = np.asarray(Image.open(BytesIO(data)) if format == "JPEG" else image)
    loaded = load_image(data)
    assert np.array_equal(np.asarray(loaded), UPRIGHT[orientation](stored))
    assert 0x0112 not in loaded.getexif()  # or whoever saves and loads it turns it once more


def test_orientation_out_of_range_and_damaged_metadata_change_nothing():
    image = smooth(40, 24)
    plain = pixels(encode(image, "JPEG"))
    for exif in (odd_images.exif(77), b"Exif\0\0MM\0*\xff\xff\xff\xff"):
        assert np.array_equal(pixels(encode(image, "JPEG", exif=exif)), plain)


def test_palettes_with_and_without_transparency():
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 200, 0, 0, 0, 200, 0])
    image.putdata([0, 1, 2])
    for format in ("PNG", "BMP", "GIF"):
        assert pixels(encode(image, format)).tolist() == [[[10, 20, 30], [200, 0, 0], [0, 200, 0]]]
    for format, hidden in (("PNG", 1), ("GIF", 1), ("PNG", bytes([255, 0, 255]))):
        shown = pixels(encode(image, format, transparency=hidden)).tolist()
        assert shown == [[[10, 20, 30], [255, 255, 255], [0, 200, 0]]]


def test_one_transparent_color_of_an_rgb_png():
    image = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert pixels(encode(image, "PNG", transparency=(1, 2, 3))).tolist() == [[[255, 255, 255], [4, 5, 6]]]


def test_16_bits_in_colour_and_grey_agree():
    values = np.arange(0, 65536, 4097, dtype=">u2")
    grey, color = (png(len(values), 1, 16, kind, b"\0" + values.repeat(kind + 1).tobytes()) for kind in (0, 2))
    assert np.array_equal(pixels(grey), pixels(color))


def test_transparent_grey_of_16_bits():
    rows = b"\0" + struct.pack(">3H", 0, 1000, 65535)
    data = png(3, 1, 16, 0, rows, (b"tRNS", struct.pack(">H", 1000)))
    assert pixels(data)[0, :, 0].tolist() == [0, 255, 255]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([0.0, 257.0 * 7, 65535.0], [0, 7, 255]),
        ([0.0, 50000.0, 100000.0], [0, 128, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, float("nan"), 1.0], [0, 0, 255]),
        ([-2.0, -2.0, -2.0], [0, 0, 0]),
    ],
)
def test_float_grey_is_scaled(values, expected):
    image = Image.fromarray(np.array([values], np.float32))
    assert pixels(encode(image, "TIFF"))[0, :, 0].tolist() == expected


def tiff(values, bits, photometric, *, kind=1, compression=1, order="<"):
    """A grey TIFF of one strip, by the specification (TIFF 6.0).

    Args:
        values: Integers (or floats of 32 bits), (H, W).
        photometric: 0 if white is zero, 1 if black is.
        kind: 1 for unsigned, 2 for signed, 3 for float samples.
        compression: 1 for none, 8 for Deflate.
    """
    height, width = values.shape
    if kind == 3 or bits == 32:
        rows = values.astype(f"{order}{'f' if kind == 3 else 'i' if kind == 2 else 'u'}4").tobytes()
    elif bits == 16:
        rows = values.astype(f"{order}u2").tobytes()
    else:  # each row is padded to bytes
        places = (values[..., None] >> np.arange(bits)[::-1]) & 1
        rows = np.packbits(places.reshape(height, -1), axis=1).tobytes()
    data = zlib.compress(rows) if compression == 8 else rows
    data += b"\0" * (len(data) % 2)
    short = [(258, bits), (259, compression), (262, photometric), (277, 1), (339, kind)]
    entries = [(tag, 3, value) for tag, value in short]
    entries += [(256, 4, width), (257, 4, height), (273, 4, 8), (278, 4, height), (279, 4, len(data))]
    packed = [
        struct.pack(f"{order}HHI" + {3: "Hxx", 4: "I"}[size], tag, size, 1, v) for tag, size, v in sorted(entries)
    ]
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(data))
    return start + data + struct.pack(f"{order}H", len(packed)) + b"".join(packed) + b"\0" * 4


@pytest.mark.parametrize("compression", [1, 8])
@pytest.mark.parametrize("white_is_zero", [False, True])
@pytest.mark.parametrize(
    ("bits", "order"), [(1, "<"), (2, "<"), (4, "<"), (8, "<"), (16, "<"), (1, ">"), (2, ">"), (4, ">"), (8, ">")]
)
def test_grey_tiff_is_read_whichever_end_is_white(bits, order, white_is_zero, compression):
    grey = np.random.default_rng(bits).integers(0, 2**bits, (7, 13))
    most = 2**bits - 1
    stored = most - grey if white_is_zero else grey
    data = tiff(stored, bits, int(not white_is_zero), compression=compression, order=order)
    expected = grey >> 8 if bits == 16 else np.rint(grey * 255 / most)
    assert np.array_equal(pixels(data)[..., 0], expected)


def test_grey_tiff_of_12_bits_is_as_bright_as_it_says():
    grey = np.random.default_rng(0).integers(0, 2**12, (7, 14))
    assert np.array_equal(pixels(tiff(grey, 12, 1))[..., 0], grey >> 4)


@pytest.mark.parametrize(
    ("values", "kind", "photometric", "expected"),
    [
        ([0, 2**31, 2**32 - 1], 1, 1, [0, 128, 255]),  # unsigned numbers that Pillow holds as signed ones
        ([0, 100, 255], 1, 1, [0, 100, 255]),
        ([-100, 0, 155], 2, 1, [0, 100, 255]),
        ([0.0, 0.2, 1.0], 3, 1, [0, 51, 255]),
        ([0.0, 0.2, 1.0], 3, 0, [255, 204, 0]),
    ],
)
def test_grey_tiff_of_32_bits(values, kind, photometric, expected):
    assert pixels(tiff(np.array([values]), 32, photometric, kind=kind))[0, :, 0].tolist() == expected


def test_cmyk_of_jpeg():
    colors = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [0, 0, 0], [255, 255, 255]], np.uint8)
    array = np.repeat(np.repeat(colors[None], 16, 0), 16, 1)  # blocks as wide as those of JPEG
    loaded = pixels(encode(Image.fromarray(array).convert("CMYK"), "JPEG", quality=100, subsampling=0))
    assert np.abs(loaded.astype(int) - array).max() <= 3


def test_lab_tiff(tmp_path):
    image = smooth(8, 8)
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    ImageCms.profileToProfile(image, srgb, lab, outputMode="LAB").save(tmp_path / "lab.tif")
    assert np.abs(pixels(tmp_path / "lab.tif").astype(int) - np.asarray(image)).mean() < 2


@pytest.mark.slow
def test_pillow_says_nothing_of_its_own(tmp_path):
    (tmp_path / "bomb.png").write_bytes(png(12_000, 12_000, 8, 2, b""))
    damaged = encode(smooth(40, 24), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    (tmp_path / "exif.jpg").write_bytes(damaged)
    samples, too_many = struct.pack("<HHIH", 277, 3, 1, 3), struct.pack("<HHIH", 277, 3, 1, 30_000)
    (tmp_path / "samples.tif").write_bytes(encode(smooth(40, 24), "TIFF").replace(samples, too_many))
    code = """if True:
        from vlm.data.images.image import ImageError, load_image
        load_image("exif.jpg")
        for name in ("bomb.png", "samples.tif"):
            try:
                load_image(name)
            except ImageError as error:
                print(error)
    """
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["bomb.png", "samples.tif"]
    assert not done.stderr


def test_the_error_survives_the_way_out_of_a_worker():
    error = pickle.loads(pickle.dumps(ImageError("a.jpg: broken")))
    assert (str(error), error.status) == ("a.jpg: broken", 1)


BICUBIC = InterpolationMode.BICUBIC


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
