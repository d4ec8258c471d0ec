"""Text files in class folders, in a folder or a tar."""

from collections.abc import Mapping
from fnmatch import fnmatch

from vlm.data.images.image import ImageError
from vlm.data.records import Record
from vlm.data.sources.class_folders import ClassFile, ClassFolders, Parts
from vlm.data.sources.tables import decode_text
from vlm.errors import Share, UserError


class TextFolders(ClassFolders):
    """Text files in class folders, in the layout of ClassFolders.

    Args:
        root, path, val_fraction, test_fraction, seed: See ClassFolders.
        val_names, test_names: Pattern of names of files to hold out, such as ``cv9*``, if no folders define splits;
            None to draw them.
    Raises:
        UserError: As in ClassFolders; or, when it is read, a file is not UTF-8.
    """

    holds = ("text", "label")
    suffixes = (".txt",)
    unit = "text"
    unlabelled = "; a task without classes reads such texts by data=text"

    def __init__(
        self,
        *,
        root: str | None = None,
        path: str | None = None,
        val_names: str | None = None,
        test_names: str | None = None,
        val_fraction: Share = 0.1,
        test_fraction: Share = 0.0,
        seed: int = 0,
    ) -> None:
        self._patterns = {"val": val_names, "test": test_names}
        super().__init__(root=root, path=path, val_fraction=val_fraction, test_fraction=test_fraction, seed=seed)
        self.name = "text_folder"

    def _record(self, file: ClassFile, epoch: int) -> Record:
        place = self.place.path / file.path
        try:
            text = decode_text(self.place.read(file.path), place)
        except ImageError as fault:
            raise UserError(f"{fault}; give readable files") from fault
        known = {"text": text.strip(), "label": file.label, "class": self.classes[file.label]}
        return Record(file.path, known, read_stamp=lambda: self.place.stamp(file.path))

    def _drawn(
        self, files: list[Parts], folders: list[Parts], fractions: Mapping[str, float], seed: int
    ) -> dict[str, list[ClassFile]]:
        held: dict[str, list[Parts]] = {name: [] for name, pattern in self._patterns.items() if pattern}
        rest: list[Parts] = []
        for parts in files:
            split = next((name for name in held if fnmatch(parts[-1], str(self._patterns[name]))), None)
            (rest if split is None or len(parts) == 1 else held[split]).append(parts)
        drawn = {name: fraction for name, fraction in fractions.items() if name not in held}
        splits = super()._drawn(rest, folders, drawn, seed)
        for parts in (parts for own in held.values() for parts in own if parts[0] not in self._labels):
            raise UserError(f"{self.place.path}/{'/'.join(parts)}: train has no class {parts[0]!r}; hold out fewer")
        return splits | {name: [self._file(parts, parts[0]) for parts in own] for name, own in held.items()}
