"""Images in one tar, in folders that name their classes; read where they lie and never unpacked."""

import tarfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vlm.data.class_files import ClassFiles
from vlm.data.image import MAX_BYTES, ImageError, load_image
from vlm.errors import UserError


class Span(NamedTuple):
    """Where a member's content lies in the tar."""

    offset: int
    size: int


class ImageTar(ClassFiles):
    """A tar of what `ImageFolder` reads. Its headers are read once, when it is made; 60,000 take a second or two.

    Members that are no plain files, or whose names lead out of the archive, are passed over.

    Args:
        path: The tar, not compressed, as given or within the root.
        root: Folder that the path may be relative to.
        val_fraction, test_fraction, seed: As in ImageFolder.
    Raises:
        UserError: If there is no such file, it is not a tar, or it is not laid out so.
    """

    name = "image_tar"

    def __init__(
        self,
        *,
        path: str,
        root: str | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        seed: int = 0,
    ) -> None:
        candidates = [Path(path)] if root is None else [Path(path), Path(root) / path]
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            raise UserError(f"data.path={path}: no such file; set data.path to a tar of class folders")
        self.path = file
        self._spans, folders = _index(file)
        super().__init__(
            place=str(file),
            setting="data.path",
            files=self._spans,
            folders=folders,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            seed=seed,
        )

    def read(self, path: str) -> Image.Image:
        name, span = f"{self.path}/{path}", self._spans[path]
        try:
            return load_image(_content(self.path, span))
        except ImageError as fault:
            raise ImageError(f"{name}{str(fault).removeprefix('<bytes>')}") from fault
        except (OSError, ValueError) as fault:
            raise ImageError(f"{name}: {getattr(fault, 'strerror', None) or fault}") from fault


def _content(path: Path, span: Span) -> bytes:
    if span.size > MAX_BYTES:
        raise ValueError(f"the file has {span.size:,} bytes; {MAX_BYTES:,} are the most")
    # Opened for each image: it costs microseconds, and workers then share no place in the file and inherit nothing.
    with open(path, "rb", buffering=0) as file:
        file.seek(span.offset)
        data = file.read(span.size) or b""
    if len(data) < span.size:
        raise ValueError("the tar ends within it")
    return data


def _index(path: Path) -> tuple[dict[str, Span], list[str]]:
    """Where each plain file of a tar lies, by its path without a leading ``./``; and the paths of its folders.

    Raises:
        UserError: If it is no tar.
    """
    spans: dict[str, Span] = {}
    folders: list[str] = []
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                name = _safe_name(member.name)
                if name and member.isdir():
                    folders.append(name)
                elif name and member.isreg() and not member.issparse():
                    spans[name] = Span(member.offset_data, member.size)
            _check_end(path, archive.offset)
    except (OSError, tarfile.TarError) as fault:
        raise UserError(
            f"{path}: cannot be read as a tar ({fault}); give one that is whole and not compressed (gunzip it first)"
        ) from fault
    return spans, folders


def _check_end(path: Path, offset: int) -> None:
    """A tar ends with blocks of zeros; tarfile takes whatever else it cannot read for the end as well."""
    with open(path, "rb") as file:
        file.seek(offset)
        block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("the file ends too early")
    if any(block):
        raise tarfile.ReadError(f"damaged at byte {offset:,}")


def _safe_name(name: str) -> str:
    """The path within the archive; empty where it leads out of it."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    unsafe = name.startswith("/") or ".." in parts or any("\\" in part or "\0" in part for part in parts)
    return "" if unsafe else "/".join(parts)
