"""Images or texts with a class each: class folders, tars and tables."""

from collections import Counter
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from functools import partial
from os.path import splitext
from pathlib import Path
from typing import ClassVar, NamedTuple, Unpack

from vlm.data.hold_out import check_fractions, draw_stratified_splits
from vlm.data.images.image import SUFFIXES, ImageError
from vlm.data.records import NAMES, SPLITS, ListSplit, Record, Source, Split, report_error
from vlm.data.sources.caption_source import check_missing
from vlm.data.sources.caption_tables import FolderWithTables, relative_to_root
from vlm.data.sources.captions import resolve_root
from vlm.data.sources.tables import decode_text
from vlm.data.sources.text_source import Sample, SampleRow
from vlm.data.sources.text_tables import TableOptions, TableSource, TextTable
from vlm.data.store.places import FileStore, Folder, Tar
from vlm.errors import Share, UserError

_FOREIGN = ("__MACOSX",)  # folders that macOS adds to archives

Parts = tuple[str, ...]


class ClassFile(NamedTuple):
    """A file: its path in the data set, and its class."""

    path: str
    label: int


class ClassFolders(Source):
    """Images in class folders, in the layout of torchvision's ImageFolder, or one such folder per split.

    The layout is ``train/CLASS/...`` with ``val`` and ``test`` (or synonyms), or else ``CLASS/...``, from which val and
    test are drawn with stratification. A single enclosing folder is skipped; names that begin with a dot, and files
    that are not images, are ignored.

    Args:
        root: Folder of the class folders or of the splits; with `path`, a folder that it may be relative to.
        path: An uncompressed tar of them instead.
        val_fraction: Share of each class held out for validation if no folders define splits.
        test_fraction: Share of each class held out for test if no folders define splits.
        seed: Seed of the held-out images.
    Raises:
        UserError: The folder or tar does not exist, there is no image, there are fewer than two classes, a class of
            train is empty, or val or test has a class that train lacks.
    Attributes:
        suffixes: File suffixes to read.
        unit: Word for a sample in messages.
    """

    holds = ("image", "label")
    suffixes: ClassVar[Collection[str]] = SUFFIXES
    unit: ClassVar[str] = "image"
    unlabelled: ClassVar[str] = ""  # another way to read a folder without class folders, for the error message

    def __init__(
        self,
        *,
        root: str | None = None,
        path: str | None = None,
        val_fraction: Share = 0.1,
        test_fraction: Share = 0.0,
        seed: int = 0,
    ) -> None:
        check_fractions(val_fraction, test_fraction)
        self._setting = "data.root" if path is None else "data.path"
        self.name = "image_folder" if path is None else "image_tar"
        self.place = _open_store(root, path)
        self.skipped: list[str] = []
        files = sorted(
            parts
            for parts in map(_visible_parts, self.place.files())
            if parts and splitext(parts[-1])[1].lower() in self.suffixes
        )
        if not files:
            raise UserError(self._layout_error(f"contains no {self.unit} in a supported format"))
        base: Parts = ()  # enclosing folders that contain everything, such as the root of an archive
        while len({parts[len(base)] for parts in files}) == 1 and min(map(len, files)) >= len(base) + 3:
            if files[0][len(base)].lower() in SPLITS:
                break
            base = files[0][: len(base) + 1]
        files = [parts[len(base) :] for parts in files]
        folders = [
            parts[len(base) :] for parts in map(_visible_parts, self.place.folders()) if parts[: len(base)] == base
        ]
        self._base = "/".join((*base, ""))
        # The first folders are splits; a class called train would have its files directly inside.
        splits = {SPLITS.get(parts[0].lower()) if len(parts) > 2 else None for parts in files}
        if "train" in splits or None not in splits:
            self._files = self._splits_by_folder(files, folders)
        else:
            self._files = self._draw_splits(files, folders, {"test": test_fraction, "val": val_fraction}, seed)
        self.splits = tuple(name for name in NAMES if self._files.get(name))

    def open(self, name: str) -> Split:
        return ListSplit(self._files[name], self._record)

    def _record(self, file: ClassFile, epoch: int) -> Record:
        values = {"label": file.label, "class": self.classes[file.label]}
        read = (partial(function, file.path) for function in (self.place.image, self.place.read, self.place.stamp))
        return Record(file.path, values, *read)  # type: ignore[arg-type]

    def _splits_by_folder(self, files: list[Parts], folders: list[Parts]) -> dict[str, list[ClassFile]]:
        """Splits given by the first folder of each path."""
        by_split: dict[str, list[Parts]] = {name: [] for name in NAMES}
        strays = []
        for parts in files:
            split = SPLITS.get(parts[0].lower())
            if split and len(parts) > 2:
                by_split[split].append(parts)
            else:
                strays.append(parts)
        self._report_strays(strays, "not in a class folder of a split")
        if not by_split["train"]:
            *first, last = sorted({parts[0] for parts in files})
            names = " and ".join(filter(None, (", ".join(first), last)))
            raise UserError(self._layout_error(f"has {names}, but no train folder"))
        empty = {parts[:2] for parts in folders if len(parts) > 1 and SPLITS.get(parts[0].lower()) == "train"}
        self._set_classes({parts[1] for parts in by_split["train"]}, empty - {parts[:2] for parts in by_split["train"]})
        for folder in dict.fromkeys(parts[:2] for name in NAMES for parts in by_split[name]):
            if folder[1] not in self._labels:
                report_error(
                    f"{self.place.path}/{self._base}{'/'.join(folder)}: the training {self.unit}s have no class "
                    f"{folder[1]!r}; rename the folder to the right class, or add such {self.unit}s to train"
                )
        return {
            name: [self._file(parts, parts[1]) for parts in by_split[name] if parts[1] in self._labels]
            for name in NAMES
        }

    def _draw_splits(
        self, files: list[Parts], folders: list[Parts], fractions: Mapping[str, float], seed: int
    ) -> dict[str, list[ClassFile]]:
        """Splits drawn by fractions of each class."""
        self._report_strays([parts for parts in files if len(parts) == 1], "in no class folder")
        files = [parts for parts in files if len(parts) > 1]
        if not files:
            raise UserError(self._layout_error(f"has {self.unit}s, but none in a class folder", self.unlabelled))
        empty = {parts[:1] for parts in folders if parts} - {parts[:1] for parts in files}
        self._set_classes({parts[0] for parts in files}, empty)
        classed = [self._file(parts, parts[0]) for parts in files]
        parts = draw_stratified_splits(
            [file.label for file in classed], [file.path for file in classed], fractions, seed
        )
        return {name: [classed[index] for index in indices] for name, indices in parts.items()}

    def _set_classes(self, classes: set[str], empty: set[Parts]) -> None:
        for folder in sorted(empty):
            path = f"{self.place.path}/{self._base}{'/'.join(folder)}"
            report_error(f"{path}: contains no {self.unit} in a supported format; add {self.unit}s or remove it")
        if len(classes) < 2:
            report_error(self._layout_error(f"has only one class, {min(classes)}; at least two are needed"))
        self.classes = sorted(classes)
        self._labels = {name: label for label, name in enumerate(self.classes)}

    def _file(self, parts: Parts, name: str) -> ClassFile:
        return ClassFile(self._base + "/".join(parts), self._labels[name])

    def _report_strays(self, strays: list[Parts], why: str) -> None:
        for folder, count in sorted(Counter("/".join(parts[:-1]) for parts in strays).items()):
            where = f"{self.place.path}/{self._base}{folder}".rstrip("/")
            self.skipped.append(f"{where}: {count} {self.unit}{'s' * (count > 1)} {why}")

    def _layout_error(self, what: str, remedy: str = "") -> str:
        file = self.unit.upper()
        return (
            f"{self.place.path}: {what}; set {self._setting} to a folder with CLASS/{file}, or with "
            f"train/CLASS/{file} and val/CLASS/{file}{remedy}"
        )


def _visible_parts(path: str) -> Parts:
    """The parts of a path; empty if it is hidden."""
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    return () if any(part[0] == "." or part in _FOREIGN for part in parts) else parts


def _open_store(root: str | None, path: str | None) -> FileStore:
    """Opens the folder, or the tar at `path`, which may be relative to the root."""
    if path is None:
        if root is None or not Path(root).is_dir():
            raise UserError(f"data.root={root}: no such folder; set data.root to where the class folders are")
        return Folder(Path(root))
    candidates = [Path(path)] if root is None else [Path(path), Path(root) / path]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise UserError(f"data.path={path}: no such file; set data.path to a tar of class folders")
    return Tar(file)


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
        values = {"text": text.strip(), "label": file.label, "class": self.classes[file.label]}
        return Record(file.path, values, read_stamp=lambda: self.place.stamp(file.path))

    def _draw_splits(
        self, files: list[Parts], folders: list[Parts], fractions: Mapping[str, float], seed: int
    ) -> dict[str, list[ClassFile]]:
        by_split: dict[str, list[Parts]] = {name: [] for name, pattern in self._patterns.items() if pattern}
        rest: list[Parts] = []
        for parts in files:
            split = next((name for name in by_split if fnmatch(parts[-1], str(self._patterns[name]))), None)
            (rest if split is None or len(parts) == 1 else by_split[split]).append(parts)
        missing_fractions = {name: fraction for name, fraction in fractions.items() if name not in by_split}
        splits = super()._draw_splits(rest, folders, missing_fractions, seed)
        for parts in (parts for held_out in by_split.values() for parts in held_out if parts[0] not in self._labels):
            report_error(f"{self.place.path}/{'/'.join(parts)}: train has no class {parts[0]!r}; hold out fewer")
        return splits | {
            name: [self._file(parts, parts[0]) for parts in held_out if parts[0] in self._labels]
            for name, held_out in by_split.items()
        }


class ImageTable(TextTable):
    """Images with labels, one per row: Parquet and folders of `datasets` with images, or any table of file names.

    Args:
        root: Folder that image names are relative to; default the table's folder.
        image_column: Name of the column of images.
        label_column: Name of the column of labels.
        options: See TableSource; held-out samples are stratified by class.
    Raises:
        UserError: As in TextTable; or too many images are missing.
    """

    holds = ("image", "label")
    name = "image_table"

    def __init__(
        self,
        *,
        image_column: str = "image",
        label_column: str = "label",
        **options: Unpack[TableOptions],
    ) -> None:
        root = resolve_root(options.get("root"), options["path"])
        self.place = FolderWithTables(Path(root), image_column)
        TableSource.__init__(self, {"image": image_column, "label": label_column}, **options)
        for split, rows in self._samples.items():
            self._samples[split] = self._drop_missing(rows, options["path"])
        self._number_labels(options["path"])

    def _assign_splits(
        self, path: Path, samples: list[Sample], fractions: dict[str, float], seed: int
    ) -> dict[str, list[SampleRow]]:
        by_image: dict[str, Sample] = {}
        for sample in samples:
            first = by_image.setdefault(self._split_key(sample), sample)
            if (first.values["label"], first.split) != (sample.values["label"], sample.split):
                report_error(
                    f"{path}, {sample.position}: {sample.values['image']} has another label or split in "
                    f"{first.position}; correct one of them"
                )
        return super()._assign_splits(path, list(by_image.values()), fractions, seed)

    def _split_key(self, sample: Sample) -> str:
        return relative_to_root(sample.values["image"], self.place.path)

    def _drop_missing(self, rows: list[SampleRow], path: str) -> list[SampleRow]:
        """The rows with existing images; missing ones are listed in `skipped`."""
        names = [relative_to_root(values["image"], self.place.path) for _, values in rows]
        present = {name for name in set(names) if self.place.has(name)}
        absent = [name for name in names if name not in present]
        self.skipped += check_missing(self.place, absent, len(rows), Path(path), self.place.path)
        pairs = zip(names, rows, strict=True)
        return [(id, {**values, "image": name}) for name, (id, values) in pairs if name in present]

    def _record(self, split: str, sample: SampleRow, epoch: int) -> Record:
        id, values = sample
        read = (
            partial(function, values["image"]) for function in (self.place.image, self.place.read, self.place.stamp)
        )
        return Record(id, {"label": values["label"], "class": values["class"]}, *read)  # type: ignore[arg-type]
