"""Image files that are odd or hostile, each made when it is asked for."""

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 48, 32
BLOCK = 8


def picture():
    """Blocks of few colours: every lossless format and every palette holds it exactly."""
    colors = np.random.default_rng(7).integers(0, 256, (HEIGHT // BLOCK, WIDTH // BLOCK, 3), dtype=np.uint8)
    return colors.repeat(BLOCK, 0).repeat(BLOCK, 1)


ARRAY = picture()
RGB = Image.fromarray(ARRAY)
TURNED = Image.fromarray(np.ascontiguousarray(np.rot90(ARRAY, 1)))  # what a camera on its side stores


def encode(image, format, **options):
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, bit_depth, color_type, rows, *chunks):
    """A PNG made by hand, for what no encoder writes."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bit_depth, color_type, 0, 0, 0))
    body = b"".join(chunk(*one) for one in chunks) + chunk(b"IDAT", rows)
    return b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IEND", b"")


def packed_png(width, height, channels, *chunks, depth=8, kind=2):
    """A PNG of zeros, which packs a thousandfold."""
    packer, row = zlib.compressobj(1), bytes(1 + width * channels * depth // 8)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return png(width, height, depth, kind, rows, *chunks)


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def hidden():
    """Transparent pixels with other colours under them, where the picture is white."""
    image = RGB.convert("RGBA")
    image.paste((9, 99, 199, 0), (0, 0, BLOCK, BLOCK))
    return image


def white_corner():
    array = ARRAY.copy()
    array[:BLOCK, :BLOCK] = 255
    return array


def palette(image=RGB):
    return image.quantize(64, dither=Image.Dither.NONE)


def sixteen_bits():
    rows = (ARRAY.astype(int) * 256 + 17).astype(">u2").reshape(HEIGHT, -1)
    return png(WIDTH, HEIGHT, 16, 2, zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))


def rle_bmp():
    image = palette()
    plain = bytearray(encode(image, "BMP"))
    start = struct.unpack_from("<I", plain, 10)[0]
    rows = np.asarray(image)[::-1]
    lines = (b"".join(bytes([BLOCK, row[x]]) for x in range(0, WIDTH, BLOCK)) + b"\0\0" for row in rows)
    data = b"".join(lines) + b"\0\1"
    struct.pack_into("<I", plain, 30, 1)  # RLE8
    struct.pack_into("<I", plain, 34, len(data))
    struct.pack_into("<I", plain, 2, start + len(data))
    return bytes(plain[:start]) + data


def animated_image(format, **options):
    others = [Image.new("RGB", RGB.size, "red"), Image.new("RGB", RGB.size, "lime")]
    first = palette() if format == "GIF" else RGB
    return encode(first, format, save_all=True, append_images=others, **options)


def with_segments(data, segment, count):
    return data[:2] + segment * count + data[2:]


def plain_ppm():
    return f"P3\n# a comment\n{WIDTH} {HEIGHT}\n255\n{' '.join(map(str, ARRAY.ravel()))}\n".encode()


TEXT = chunk(b"tEXt", b"Title\0" + b"x" * 10**6)
# The same picture in each of these files.
SAME = {
    "png": lambda: encode(RGB, "PNG"),
    "png palette": lambda: encode(palette(), "PNG"),
    "png rgba opaque": lambda: encode(RGB.convert("RGBA"), "PNG"),
    "png 16 bits": sixteen_bits,
    "png turned": lambda: encode(TURNED, "PNG", exif=exif(6)),
    "png animated": lambda: animated_image("PNG"),
    "png with text": lambda: encode(RGB, "PNG")[:33] + TEXT + encode(RGB, "PNG")[33:],
    "png of many parts": lambda: split_chunks(encode(RGB, "PNG")),
    "png and more": lambda: encode(RGB, "PNG") + b"appended" * 1000,
    "bmp": lambda: encode(RGB, "BMP"),
    "bmp palette": lambda: encode(palette(), "BMP"),
    "bmp run lengths": rle_bmp,
    "gif": lambda: encode(palette(), "GIF"),
    "gif animated": lambda: animated_image("GIF", duration=10, loop=0),
    "gif with comment": lambda: encode(palette(), "GIF", comment=b"c" * 5000),
    "tiff": lambda: encode(RGB, "TIFF"),
    "tiff lzw": lambda: encode(RGB, "TIFF", compression="tiff_lzw"),
    "tiff deflate": lambda: encode(RGB, "TIFF", compression="tiff_adobe_deflate"),
    "tiff packbits": lambda: encode(RGB, "TIFF", compression="packbits"),
    "tiff palette": lambda: encode(palette(), "TIFF"),
    "tiff rgba": lambda: encode(RGB.convert("RGBA"), "TIFF"),
    "tiff cmyk": lambda: encode(RGB.convert("CMYK"), "TIFF"),
    "tiff big": lambda: encode(RGB, "TIFF", big_tiff=True),
    "tiff turned": lambda: encode(TURNED, "TIFF", exif=exif(6)),
    "tiff of pages": lambda: animated_image("TIFF"),
    "webp": lambda: encode(RGB, "WEBP", lossless=True),
    "webp turned": lambda: encode(TURNED, "WEBP", lossless=True, exif=exif(6)),
    "webp animated": lambda: animated_image("WEBP", lossless=True),
    "ppm": lambda: encode(RGB, "PPM"),
    "ppm plain": plain_ppm,
    "ppm 16 bits": lambda: b"P6 %d %d 65535\n" % (WIDTH, HEIGHT) + (ARRAY.astype(">u2") * 257).tobytes(),
}


def split_chunks(data):
    """The same PNG with a chunk for every byte of its pixels."""
    start = data.index(b"IDAT") - 4
    size = struct.unpack_from(">I", data, start)[0]
    parts = b"".join(chunk(b"IDAT", data[at : at + 1]) for at in range(start + 8, start + 8 + size))
    return data[:start] + parts + data[start + 12 + size :]


def grey(values, **options):
    return encode(Image.fromarray(np.array(values)), "TIFF", **options)


def rows_of(*values):
    return np.repeat(np.array([values], np.uint8)[..., None], 3, 2)


BLUE = np.uint8([[[0, 0, 255]] * 2**16])
# What each of these shows.
SHOWN = {
    "alpha over white": (lambda: encode(hidden(), "PNG"), white_corner()),
    "alpha over white, webp": (lambda: encode(hidden(), "WEBP", lossless=True, exact=True), white_corner()),
    "alpha over white, tiff": (lambda: encode(hidden(), "TIFF"), white_corner()),
    "half transparent grey": (lambda: encode(Image.new("LA", (2, 1), (0, 51)), "PNG"), rows_of(204, 204)),
    "grey of 16 bits": (lambda: grey(np.uint16([[0, 257, 32896, 65535]])), rows_of(0, 1, 128, 255)),
    "float from 0 to 1": (lambda: grey(np.float32([[0, 0.5, 1]])), rows_of(0, 128, 255)),
    "float with infinity": (lambda: grey(np.float32([[0, np.inf, 1]])), rows_of(0, 0, 255)),
    "whole numbers of 32 bits": (lambda: grey(np.int32([[0, 2**30, 2**31 - 1]])), rows_of(0, 128, 255)),
    "black and white": (lambda: encode(Image.fromarray(np.array([[True, False]])), "PNG"), rows_of(255, 0)),
    "fax": (lambda: grey([[True, False]], compression="group4"), rows_of(255, 0)),
    "black and white, pbm": (lambda: b"P1\n2 1\n0 1\n", rows_of(255, 0)),
    "grey of 16 bits, png": (lambda: encode(Image.fromarray(np.uint16([[0, 257, 65535]])), "PNG"), rows_of(0, 1, 255)),
    "grey of 16 bits, pgm": (lambda: encode(Image.fromarray(np.uint16([[0, 257, 65535]])), "PPM"), rows_of(0, 1, 255)),
    "as wide as may be": (lambda: encode(Image.new("RGB", (2**16, 1), "blue"), "PNG"), BLUE),
}


def scans(count, side):
    """A JPEG that goes over the same pixels again and again: ten bytes a scan."""
    data = encode(Image.new("RGB", (side, side), (90, 100, 110)), "JPEG", progressive=True)
    last = data[data.rfind(b"\xff\xda") : -2]
    return data[:-2] + last * count + data[-2:]


def tags(values, kind=4, count=1):
    """Entries of a TIFF, by their numbers."""
    return b"".join(struct.pack("<HHII", tag, kind, count, value) for tag, value in values.items())


def tiff(content, *tables):
    """A TIFF of bytes after its header, and of entries after them."""
    table = b"".join(tables)
    return (
        b"II*\0"
        + struct.pack("<I", 8 + len(content))
        + content
        + struct.pack("<H", len(table) // 12)
        + table
        + bytes(4)
    )


def overlapping_tiff(entries=400, size=2**22):
    """Each of many entries claims the same bytes as its own."""
    base = {256: 8, 257: 8, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 8, 279: 64}
    return tiff(bytes(size), tags(base), tags({40000 + n: 8 for n in range(entries)}, 7, size))


def tiled_tiff():
    base = {256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: 2**15, 323: 2**15, 324: 8, 325: 16}
    return tiff(zlib.compress(bytes(64))[:16].ljust(16), tags(base))


def sparse_tiff(strips=300_000):
    start = 8 + 2 + 12 * 9 + 4
    first, last = {256: 8, 257: 8, 258: 8, 259: 1, 262: 1}, {277: 1, 278: 1}
    ends = tags({273: start}, 4, strips), tags({279: start + 4 * strips}, 4, strips)
    return tiff(b"", tags(first), ends[0], tags(last), ends[1]) + bytes(8 * strips)


def half(data, part=0.6):
    return data[: int(len(data) * part)]


def flip_byte(data):
    broken = bytearray(data)
    broken[len(broken) // 2] ^= 0xFF
    return bytes(broken)


def noise():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


def wide_webp():
    vp8x = b"VP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\xff\xff" + b"\xff\0\0"
    return b"RIFF" + struct.pack("<I", 4 + len(vp8x)) + b"WEBP" + vp8x


def countless_blocks():
    data = encode(palette(), "GIF", comment=b"c")
    assert b"!\xfe\x01c\0" in data
    return data.replace(b"!\xfe\x01c\0", b"!\xfe" + b"\x01c" * 140_000 + b"\0")


# Files that are refused, with what is said of them.
REFUSED = {
    "nothing": (lambda: b"", "empty"),
    "text": (lambda: b"a caption, not a picture\n" * 50, "not an image"),
    "zeros": (lambda: bytes(4096), "not an image"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),
    "icon": (lambda: encode(RGB, "ICO"), "not an image"),
    "pcx": (lambda: encode(RGB, "PCX"), "not an image"),
    "tga": (lambda: encode(RGB, "TGA"), "not an image"),
    "png cut": (lambda: half(encode(noise(), "PNG")), "."),
    "png cut in its header": (lambda: encode(RGB, "PNG")[:20], "."),
    "jpeg cut": (lambda: half(encode(noise(), "JPEG")), "truncated"),
    "progressive jpeg cut": (lambda: half(encode(noise(), "JPEG", progressive=True)), "truncated"),
    "gif cut": (lambda: half(encode(noise(), "GIF")), "."),
    "webp cut": (lambda: half(encode(noise(), "WEBP", lossless=True)), "."),
    "tiff cut": (lambda: half(encode(noise(), "TIFF", compression="tiff_lzw")), "."),
    "bmp cut": (lambda: half(encode(noise(), "BMP")), "."),
    "ppm cut": (lambda: half(encode(noise(), "PPM")), "."),
    "png damaged": (lambda: flip_byte(encode(noise(), "PNG")), "."),
    "bomb": (lambda: png(100_000, 100_000, 8, 2, zlib.compress(bytes(1000))), "pixels"),
    "bomb within a side": (lambda: png(12_000, 12_000, 8, 2, zlib.compress(bytes(1000))), "pixels"),
    "thin bomb": (lambda: png(2**31 - 1, 1, 8, 0, b""), "pixels|invalid|large"),
    "gif bomb": (lambda: b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x08" + bytes(10), "pixels"),
    "webp bomb": (wide_webp, "too large"),
    "ppm bomb": (lambda: b"P6 60000 60000 255\n" + bytes(1000), "too large|pixels"),
    "slow ppm of too many pixels": (lambda: b"P6 4096 4096 254\n" + bytes(3 * 2**24), "too large"),
    "endless ppm comment": (lambda: b"P6 " + b"#" + b"c" * 2**20 + b"\n8 8 255\n" + bytes(192), "header"),
    "jpeg of many scans": (lambda: scans(3000, 512), "scans"),
    "large jpeg of scans": (lambda: scans(90, 4096), "scans"),
    "tiff whose entries overlap": (overlapping_tiff, "claim more"),
    "tiff of giant tiles": (tiled_tiff, "tiles"),
    "tiff of countless strips": (sparse_tiff, "claim more"),
    "png of countless chunks": (lambda: packed_png(8, 8, 3, *[(b"abCd", b"")] * 140_000), "pieces"),
    "gif of countless blocks": (countless_blocks, "pieces"),
    "jpeg of countless comments": (lambda: with_segments(encode(RGB, "JPEG"), b"\xff\xfe\0\2", 140_000), "pieces"),
}


def exif_bomb():
    """Metadata whose entries all claim the same bytes: a reader of all of them would take gigabytes."""
    return tiff(bytes(2**22), tags({1000 + n: 8 for n in range(60_000)}, 7, 2**22))


# Files of few bytes that take the most memory or time of all that may be read.
HEAVY = {
    "png with alpha in 16 bits": lambda: packed_png(8192, 8192, 4, depth=16, kind=6),
    "png with metadata": lambda: packed_png(64, 64, 3, (b"eXIf", exif_bomb())),
    "jpeg turned": lambda: encode(Image.new("RGB", (8192, 8192)), "JPEG", exif=exif(6)),
    "progressive jpeg": lambda: encode(Image.new("RGB", (8192, 8192)), "JPEG", progressive=True, subsampling=0),
    "jpeg of scans": lambda: scans(80, 3000),
    "webp": lambda: encode(Image.new("RGBA", (8192, 4096)), "WEBP", lossless=True, method=0),
    "float tiff": lambda: encode(Image.new("F", (8192, 8192)), "TIFF", compression="tiff_lzw"),
    "slow ppm": lambda: b"P6 2048 2048 254\n" + bytes(3 * 2**22),
}
