"""Reads the headers of tars that anybody may have written, within limits."""

import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

MAX_HEADER = 2**20  # bytes of a header's extensions, which Python reads into memory at once
BLOCK = tarfile.BLOCKSIZE


class TarError(ValueError):
    """A tar that is damaged or incomplete."""


class Span(NamedTuple):
    """The position of a member's content in the tar."""

    offset: int
    size: int


class Member(NamedTuple):
    """A regular file of a tar, or a folder (without span), by its path without a leading ``./``."""

    name: str
    span: Span | None


def iter_members(file: BinaryIO) -> Iterator[Member]:
    """Yields the files and folders of a tar in order; reads headers only.

    Ignores links, devices, sparse files and names that point outside of the archive.

    Args:
        file: A seekable file.
    Raises:
        TarError: It is not a tar, incomplete or damaged, or a header is too large.
        OSError: It cannot be read.
    """
    try:
        yield from _iter_members(file)
    except (tarfile.TarError, RecursionError, ValueError, OverflowError) as fault:
        raise TarError(" ".join(str(fault).split()) or type(fault).__name__) from fault


def _iter_members(file: BinaryIO) -> Iterator[Member]:
    size = file.seek(0, 2)
    file.seek(0)
    with tarfile.open(fileobj=cast(BinaryIO, _Headers(file)), mode="r:") as archive:
        while (member := archive.next()) is not None:
            cast(Any, archive).members.clear()  # tarfile would keep all of them
            name = safe_name(member.name)
            if member.size < 0 or archive.offset < member.offset_data:  # would loop forever
                raise tarfile.ReadError(f"a member of {member.size} bytes")
            if name and member.isdir():
                yield Member(name, None)
            elif name and member.isreg() and not member.issparse():
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError("the file ends too early")
                yield Member(name, Span(member.offset_data, member.size))
        file.seek(archive.offset)
        block = file.read(BLOCK)
        if len(block) < BLOCK:
            raise tarfile.ReadError("the file ends too early")
        if any(block):  # the end is zero blocks; tarfile also takes unreadable data for it
            raise tarfile.ReadError(f"damaged at byte {archive.offset:,}")


class _Headers:
    """A file that refuses to read more than a header at once."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes; at most {MAX_HEADER:,} are allowed")
        return self._read(size)


def safe_name(name: str) -> str:
    """The path inside the archive; empty if it points outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    unsafe = name.startswith("/") or ".." in parts or any("\\" in part or "\0" in part for part in parts)
    return "" if unsafe else "/".join(parts)
