"""Colours, orientation and transparency of single formats; tests/reliability/test_images.py has files of all kinds."""

import os
import pickle
import struct
import subprocess
import sys
import zlib
from io import BytesIO

import numpy as np
import odd_images
import pytest
import torch
from odd_images import encode
from PIL import Image, ImageCms

from vlm.data.images.image import ImageError, Preprocess, load_image

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
