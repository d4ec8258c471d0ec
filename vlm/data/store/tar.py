"""The members of a tar that is never unpacked, and may have been made to do harm."""

import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

from vlm.data.images.image import MAX_BYTES

MAX_HEADER = 2**20  # bytes of a header's extensions, which Python reads into memory whole
BLOCK = tarfile.BLOCKSIZE


class TarError(ValueError):
    """A tar that cannot be read whole."""


class Span(NamedTuple):
    """The place of a member's content in the tar."""

    offset: int
    size: int


class Member(NamedTuple):
    """A plain file of a tar, or a folder (which has no span), by its path without a leading ``./``."""

    name: str
    span: Span | None


def members(file: BinaryIO) -> Iterator[Member]:
    """The files and folders of a tar in its own order; only headers are read.

    Links, devices, sparse files and names that lead out of the archive are passed over.

    Args:
        file: It can be sought in.
    Raises:
        TarError: It is no tar, not whole or damaged, or a header asks for more than any name needs.
        OSError: It cannot be read.
    """
    try:
        yield from _members(file)
    except (tarfile.TarError, RecursionError, ValueError, OverflowError) as fault:
        raise TarError(" ".join(str(fault).split()) or type(fault).__name__) from fault


def _members(file: BinaryIO) -> Iterator[Member]:
    size = file.seek(0, 2)
    file.seek(0)
    with tarfile.open(fileobj=cast(BinaryIO, _Headers(file)), mode="r:") as archive:
        while (member := archive.next()) is not None:
            cast(Any, archive).members.clear()  # it would keep them all
            name = safe_name(member.name)
            if member.size < 0 or archive.offset < member.offset_data:  # it would go round in circles
                raise tarfile.ReadError(f"a member of {member.size} bytes")
            if name and member.isdir():
                yield Member(name, None)
            elif name and member.isreg() and not member.issparse():
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError("the file ends too early")
                yield Member(name, Span(member.offset_data, member.size))
        _check_end(file, archive.offset)


class _Headers:
    """A file of which no piece is read that is larger than headers are."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes; {MAX_HEADER:,} are the most")
        return self._read(size)


def _check_end(file: BinaryIO, offset: int) -> None:
    """A tar ends with blocks of zeros; tarfile takes whatever else it cannot read for the end as well."""
    file.seek(offset)
    block = file.read(BLOCK)
    if len(block) < BLOCK:
        raise tarfile.ReadError("the file ends too early")
    if any(block):
        raise tarfile.ReadError(f"damaged at byte {offset:,}")


def check_span(span: Span) -> None:
    """Refuses a member that is too large for a file.

    Raises:
        ValueError: It is.
    """
    if span.size > MAX_BYTES:
        raise ValueError(f"the file has {span.size:,} bytes; {MAX_BYTES:,} are the most")


def read_span(path: str, span: Span) -> bytes:
    """The content of a member.

    Raises:
        ValueError: It is too large, or the tar ends within it.
        OSError: The tar cannot be read.
    """
    check_span(span)
    # Opened for each image: it costs microseconds, and workers then share no place in the file and inherit nothing.
    with open(path, "rb", buffering=0) as file:
        file.seek(span.offset)
        data = file.read(span.size) or b""
    if len(data) < span.size:
        raise ValueError("the tar ends within it")
    return data


def safe_name(name: str) -> str:
    """The path within the archive; empty where it leads out of it."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    unsafe = name.startswith("/") or ".." in parts or any("\\" in part or "\0" in part for part in parts)
    return "" if unsafe else "/".join(parts)
