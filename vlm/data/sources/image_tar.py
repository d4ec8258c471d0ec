"""Images in one tar, in folders that name their classes; read where they lie and never unpacked."""

from pathlib import Path

from PIL import Image

from vlm.data.images.image import ImageError, load_image
from vlm.data.sources.class_files import ClassFiles
from vlm.data.store.storage import stamp
from vlm.data.store.tar import Span, TarError, members, read_span
from vlm.errors import Share, UserError


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
        val_fraction: Share = 0.1,
        test_fraction: Share = 0.0,
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
        try:
            return load_image(self.content(path))
        except ImageError as fault:
            raise ImageError(str(fault).replace("<bytes>", f"{self.path}/{path}", 1)) from fault

    def content(self, path: str) -> bytes:
        try:
            return read_span(str(self.path), self._spans[path])
        except (OSError, ValueError) as fault:
            raise ImageError(f"{self.path}/{path}: {getattr(fault, 'strerror', None) or fault}") from fault

    def signature(self, path: str) -> str:
        return f"{stamp(str(self.path))} {self._spans[path]}"


def _index(path: Path) -> tuple[dict[str, Span], list[str]]:
    """Where each plain file of a tar lies, by its path; and the paths of its folders.

    Raises:
        UserError: If it is no tar.
    """
    spans: dict[str, Span] = {}
    folders: list[str] = []
    try:
        with open(path, "rb") as file:
            for name, span in members(file):
                if span is None:
                    folders.append(name)
                else:
                    spans[name] = span
    except (OSError, TarError) as fault:
        raise UserError(
            f"{path}: cannot be read as a tar ({fault}); give one that is whole and not compressed (gunzip it first)"
        ) from fault
    return spans, folders
