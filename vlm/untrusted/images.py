"""Checks image files before decoding, so that no file takes unbounded memory or time.

Decoders trust some numbers in a file: a JPEG may have a million scans over the same pixels, every entry of a TIFF may
refer to the same hundred megabytes, and metadata may consist of millions of pieces that are read one by one. Metadata
other than the orientation do not affect pixels, so they are removed where they cause trouble.
"""

import re
import struct
from collections.abc import Callable, Iterator

MAX_PIECES = 2**17  # chunks, segments or blocks of a file; encoders write pieces of some kilobytes
MAX_SCANS = 100  # of a JPEG, the limit of libtiff and djpeg; encoders write up to about a dozen
MAX_SCAN_PIXELS = 2**30  # pixels of all scans of a JPEG together
MAX_VALUES = 2**18  # of a TIFF entry that is not bytes; it allows a strip for each of 65,536 rows
MAX_WEBP_SIDE = 2**14  # pixels, the limit of the format
MAX_HEADER = 2**16  # bytes before the pixels of a PPM
MAX_TILE = 2**22  # pixels of a tile of a TIFF, unless the image is as large

ORIENTATION = 0x0112

_JPEG_COLOR_SEGMENTS = {0xE0, 0xEE}  # application segments that affect colours: JFIF and Adobe
_JPEG_BARE = {0x01, *range(0xD0, 0xD9)}  # markers without a segment
_JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_PNG_ANCILLARY = {b"tRNS"}
_PPM = re.compile(rb"P[14](?:(?:\s|#[^\r\n]*[\r\n])+\d+){2}\s|P[^14](?:(?:\s|#[^\r\n]*[\r\n])+[-+.\w]+){3}\s")
_TIFF_WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_TIFF_DIRECTORIES = (0x8769, 0x8825, 0xA005)  # Exif, GPS, interoperability: entries that point to other directories

Guarded = tuple[bytes, int]


def guard(data: bytes) -> Guarded:
    """Returns the part of a file that is safe to decode, and the orientation to undo (1 is upright).

    Raises:
        ValueError: The file exceeds a limit.
    """
    for prefix, check in _CHECKS.items():
        if data.startswith(prefix):
            try:
                return check(data)
            except (struct.error, IndexError) as error:
                raise ValueError("the file is truncated or damaged") from error
    return data, 1


def _check_pieces(count: int) -> None:
    if count > MAX_PIECES:
        raise ValueError(f"the file has more than {MAX_PIECES:,} pieces")


def _check_jpeg(data: bytes) -> Guarded:
    parts, exif = [data[:2]], b""
    at, start, count, scans, pixels = 2, 2, 0, 0, 0
    while at + 4 <= len(data):
        count += 1
        _check_pieces(count)
        if data[at] != 0xFF or data[at + 1] in (0x00, 0xFF):  # inside a scan, or bytes that decoders skip
            marker = _JPEG_MARKER.search(data, at)
            at = marker.start() if marker else len(data)
            continue
        kind = data[at + 1]
        if kind == 0xD9:
            break
        end = at + 2 if kind in _JPEG_BARE else at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if kind in _JPEG_FRAMES:
            pixels = max(
                pixels, int.from_bytes(data[at + 5 : at + 7], "big") * int.from_bytes(data[at + 7 : at + 9], "big")
            )
        elif kind == 0xDA:
            scans += 1
            if scans > MAX_SCANS or scans * pixels > MAX_SCAN_PIXELS:
                raise ValueError(
                    f"the file has {scans} or more scans; at most {MAX_SCANS} are allowed, fewer for large images"
                )
        elif kind == 0xFE or (0xE0 <= kind <= 0xEF and kind not in _JPEG_COLOR_SEGMENTS):
            if kind == 0xE1 and not exif and data[at + 4 : at + 10] == b"Exif\0\0":
                exif = data[at + 10 : end]
            parts.append(data[start:at])
            start = end
        at = end
    return b"".join([*parts, data[start:]]), _exif_orientation(exif)


def _check_png(data: bytes) -> Guarded:
    parts, exif, start = [data[:8]], b"", 8
    for at, kind, size in _iter_chunks(data, 8, ">I4s", 12, 1):
        if kind[:1].islower() and kind not in _PNG_ANCILLARY:
            exif = data[at + 8 : at + 8 + size] if kind == b"eXIf" else exif
            parts.append(data[start:at])
            start = at + 12 + size
        if kind == b"IEND":
            break
    return b"".join([*parts, data[start:]]), _exif_orientation(exif)


def _check_webp(data: bytes) -> Guarded:
    exif = b""
    for at, kind, size in _iter_chunks(data, 12, "<4sI", 8, 2):
        sides = [1 + int.from_bytes(data[at + place : at + place + 3], "little") for place in (12, 15)]
        if kind == b"VP8X" and max(sides) > MAX_WEBP_SIDE:  # a decoder allocates the whole canvas at once
            raise ValueError(f"{sides[0]} x {sides[1]} is too large; WebP allows {MAX_WEBP_SIDE:,} a side")
        if kind == b"EXIF":
            exif = data[at + 8 : at + 8 + size].removeprefix(b"Exif\0\0")
    return data, _exif_orientation(exif)


def _iter_chunks(data: bytes, at: int, header: str, overhead: int, multiple: int) -> Iterator[tuple[int, bytes, int]]:
    """Yields the offset, kind and content size of each chunk.

    Args:
        overhead: Number of bytes of a chunk in addition to its content.
        multiple: Multiple that sizes are padded to.
    """
    pieces = 0
    while at + 8 <= len(data):
        pieces += 1
        _check_pieces(pieces)
        parts = struct.unpack_from(header, data, at)
        kind, size = parts if isinstance(parts[0], bytes) else parts[::-1]
        yield at, kind, size
        at += overhead + -(-size // multiple) * multiple


def _check_gif(data: bytes) -> Guarded:
    """Removes extensions before the first image, except transparency; later images are not read."""
    at = 13 + (3 << ((data[10] & 7) + 1) if data[10] & 0x80 else 0)
    parts, pieces = [data[:at]], 0
    while data[at] == 0x21:
        end = at + 2
        while data[end]:
            pieces += 1
            _check_pieces(pieces)
            end += 1 + data[end]
        if data[at + 1] == 0xF9:
            parts.append(data[at : end + 1])
        at = end + 1
    return b"".join([*parts, data[at:]]), 1


def _check_ppm(data: bytes) -> Guarded:
    if not _PPM.match(data[:MAX_HEADER]):
        raise ValueError(f"the header is damaged, or longer than {MAX_HEADER:,} bytes")
    return data, 1


def _check_tiff(data: bytes) -> Guarded:
    """Checks a TIFF; Pillow itself undoes the orientation."""
    _Directories(data).check()
    return data, 1


def _exif_orientation(exif: bytes) -> int:
    try:
        return _Directories(exif).first().get(ORIENTATION, 1) if exif else 1
    except (struct.error, ValueError):  # damaged metadata do not affect the pixels
        return 1


class _Directories:
    """The directories of a TIFF or of Exif, which is one without pixels (TIFF 6.0, section 2; BigTIFF)."""

    def __init__(self, data: bytes) -> None:
        self.data, self.order = data, {b"II": "<", b"MM": ">"}.get(data[:2], "<")
        self.big = self._read("H", 2) == 43
        self.unclaimed = len(data)  # bytes that remain for the values of further entries, which may not overlap

    def first(self) -> dict[int, int]:
        """First value of each entry of the first directory, if it is an integer."""
        return self._entries(self._read("Q", 8) if self.big else self._read("I", 4))

    def check(self) -> None:
        values = self.first()
        for tag in _TIFF_DIRECTORIES:
            if tag in values:
                inner = self._entries(values[tag])
                if 0xA005 in inner:
                    self._entries(inner[0xA005])
        tile, image = (values.get(a, 0) * values.get(b, 0) for a, b in ((322, 323), (256, 257)))
        if tile > max(MAX_TILE, 2 * image):
            raise ValueError(f"the tiles have {tile:,} pixels, far more than the image")

    def _entries(self, offset: int) -> dict[int, int]:
        count = self._read("Q" if self.big else "H", offset)
        start, width, inline = (offset + 8, 20, 8) if self.big else (offset + 2, 12, 4)
        _check_pieces(count)
        values = {}
        for at in range(start, start + count * width, width):
            tag, kind = self._read("H", at), self._read("H", at + 2)
            size, number = _TIFF_WIDTHS.get(kind, 1), self._read("Q" if self.big else "I", at + 4)
            if number * size > inline:
                self.unclaimed -= number * size
            if self.unclaimed < 0 or (size > 1 and number > MAX_VALUES):
                raise ValueError("the file's entries claim more data than it contains")
            code = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}.get(kind)
            if code and number == 1:
                values[tag] = self._read(code, at + width - inline)
        return values

    def _read(self, code: str, offset: int) -> int:
        return struct.unpack_from(self.order + code, self.data, offset)[0]


_CHECKS: dict[bytes, Callable[[bytes], Guarded]] = {
    b"\xff\xd8": _check_jpeg,
    b"\x89PNG\r\n\x1a\n": _check_png,
    b"RIFF": _check_webp,
    b"GIF8": _check_gif,
    b"II": _check_tiff,
    b"MM": _check_tiff,
    b"P": _check_ppm,
}
