"""Texts of files: a file, a folder, files of each split, or several sources joined."""

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from vlm.data.hold_out import check_fractions, draw_splits, draw_stratified_splits, wrong_split_message
from vlm.data.records import NAMES, SPLITS, ListSplit, Record, SkipMessage, Source, Split, error_summary, report_error
from vlm.data.store.places import find_file, walk_folders
from vlm.data.text.words import FileDocument
from vlm.errors import Injected, Share, UserError
from vlm.randomness import key


class Sample(NamedTuple):
    """A sample of a file: its first line, its values, and its split if the file has one."""

    line: str
    values: Mapping[str, Any]
    split: str | None = None

    @property
    def position(self) -> str:
        """Position in the file, for messages."""
        return f"line {self.line}" if self.line.isdecimal() else self.line


SampleRow = tuple[str, Mapping[str, Any]]  # id and values of a sample


class FileOptions(TypedDict):
    """Arguments for reading files; see `TextSource._read`."""

    path: str
    val_path: NotRequired[str | None]
    test_path: NotRequired[str | None]
    root: NotRequired[str | None]
    val_fraction: NotRequired[Share]
    test_fraction: NotRequired[Share]
    seed: NotRequired[int]


class TextSource(Source):
    """Base of sources of texts. It reads its files on creation; unusable samples are listed in `skipped`.

    A subclass defines `samples` and calls `_read`. Splits are separate files if `val_path` or `test_path` is given,
    else the samples' own splits, else drawn, with stratification if samples have labels.
    """

    def samples(self, path: Path) -> Iterator[Sample]:
        """Yields the samples of a file, in order."""
        raise TypeError(f"{type(self).__name__} reads no file")

    def open(self, name: str) -> Split:
        return ListSplit(self._samples[name], partial(self._record, name))

    def _record(self, split: str, sample: SampleRow, epoch: int) -> Record:
        return Record(*sample)

    def _read(
        self,
        *,
        path: str | Sequence[str],
        val_path: str | None = None,
        test_path: str | None = None,
        root: str | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        """Reads the files of the splits.

        Args:
            path: The file or files; for training only if `val_path` or `test_path` is given.
            val_path: File for validation.
            test_path: File for test.
            root: Folder in which files are looked up that do not exist as given; None for none.
            val_fraction: Share of samples held out for validation if a single file has no splits.
            test_fraction: The same for test.
            seed: Seed of the held-out samples.
        Raises:
            UserError: A file is missing or has no usable sample, only some samples have a split, or a training row is
                marked as another split.
        """
        check_fractions(val_fraction, test_fraction)
        self.skipped: list[str] = []
        paths = {"train": path, "val": val_path, "test": test_path}
        files = {split: _files(split, path, root) for split, path in paths.items() if path is not None}
        if not files.get("train"):
            raise UserError("data.path: is not set; give data.path=FILE for training")
        samples = {
            split: [sample for path in split_files for sample in self.samples(path)]
            for split, split_files in files.items()
        }
        for split, split_files in files.items():
            if not samples[split]:
                raise UserError(f"{split_files[0]}: has no usable sample{error_summary(self.skipped)}")
            for sample in samples[split] if len(files) > 1 and split == "train" else ():
                if sample.split in ("val", "test"):
                    report_error(wrong_split_message(split_files[0], sample.position, sample.split))
        if len(files) == 1:
            parts = self._assign_splits(
                files["train"][0], samples["train"], {"test": test_fraction, "val": val_fraction}, seed
            )
        else:
            parts = {
                split: [(f"{split}:{sample.line}", sample.values) for sample in rows] for split, rows in samples.items()
            }
        self._set_splits(parts)

    def _set_splits(self, parts: Mapping[str, list[SampleRow]]) -> None:
        """Sets the samples of all splits."""
        self._samples = {name: parts[name] for name in NAMES if parts.get(name)}
        self.splits = tuple(self._samples)

    def _assign_splits(
        self, path: Path, samples: list[Sample], fractions: dict[str, float], seed: int
    ) -> dict[str, list[SampleRow]]:
        """Divides one file into splits."""
        rows = [(sample.line, sample.values) for sample in samples]
        stated_splits = {sample.split for sample in samples}
        if None not in stated_splits:
            return {
                name: [row for row, sample in zip(rows, samples, strict=True) if sample.split == name] for name in NAMES
            }
        if len(stated_splits) > 1:
            report_error(f"{path}: only some rows have a split; set it in all rows or in none")
        names = [self._split_key(sample) for sample in samples]
        if all("label" in values for _, values in rows):
            parts = draw_stratified_splits([values["label"] for _, values in rows], names, fractions, seed)
        else:
            parts = draw_splits(names, fractions, seed)
        return {name: [rows[index] for index in sorted(indices)] for name, indices in parts.items()}

    def _split_key(self, sample: Sample) -> str:
        """The name that is hashed to hold samples out."""
        return sample.line

    def _skip(self, path: Path, where: str, what: str, kind: str) -> None:
        self.skipped.append(SkipMessage(f"{path}, {where}: {what}", kind))


def _files(split: str, paths: str | Sequence[str], root: str | None) -> list[Path]:
    setting = "data.path" if split == "train" else f"data.{split}_path"
    folder = None if root is None else Path(root)
    return [find_file(path, folder, setting) for path in ([paths] if isinstance(paths, str) else paths)]


SUFFIXES = (".txt", ".md")


class TextFiles(Source):
    """Your own text: a file (one document), or a folder in which each .txt or .md file is a document.

    For a task that reads texts and no documents, such as masked words, each line is a text.

    Splits are separate files if `val_path` or `test_path` is given, or subfolders if all files are in folders named
    like splits. Missing splits are held out from train: some of several files, chosen by name, or the last part of a
    single one (as in nanoGPT).

    Args:
        path: A file.
        root: A folder; excludes `path`.
        val_path: File for validation, with `path`.
        test_path: File for test, with `path`.
        val_fraction: Share held out for validation if there is no validation split.
        test_fraction: Share held out for test if there is neither a validation nor a test split.
        seed: Seed of the held-out files.
        needs: The values that the task reads: ``document``, or ``text`` for each line.
    Raises:
        UserError: A file or folder is missing or empty, or the fractions leave a split without text.
    """

    holds = ("document", "text")  # one of them, see `needs`
    name = "text"

    def __init__(
        self,
        *,
        path: str | None = None,
        root: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        val_fraction: Share = 0.1,
        test_fraction: Share = 0.0,
        seed: int = 0,
        needs: Injected[Sequence[str]] = ("document",),
    ) -> None:
        self.holds = ("text",) if "text" in needs else ("document",)  # type: ignore[misc, assignment]  # narrower than the class says
        if (path is None) == (root is None):
            raise UserError("data.path, data.root: give one of them, data.path=FILE or data.root=FOLDER of text files")
        if root is not None and (val_path or test_path):
            raise UserError(
                "data.val_path, data.test_path: only with data.path; in data.root, use folders named train and val"
            )
        if not 0 < val_fraction < 1 or test_fraction < 0 or val_fraction + test_fraction >= 1:
            raise UserError(
                f"data.source.val_fraction={val_fraction} and data.source.test_fraction={test_fraction}: the first "
                "must be above 0, the second at least 0, and their sum below 1"
            )
        self.skipped: list[str] = []
        paths = {"train": path, "val": val_path, "test": test_path}
        parts = {split: [_file(split, Path(file))] for split, file in paths.items() if file is not None}
        parts = parts or self._folder(Path(str(root)))
        if "val" not in parts:
            held = {"val": val_fraction} | ({"test": test_fraction} if test_fraction and "test" not in parts else {})
            parts |= _hold_out(parts["train"], held, seed)
        self.splits = tuple(name for name in NAMES if name in parts)
        self._documents = parts

    def open(self, name: str) -> Split:
        if "text" not in self.holds:
            return ListSplit([(document, "", document) for document in self._documents[name]], self._record)
        texts = [(document, line) for document in self._documents[name] for line in document.texts()]
        if not texts:
            raise UserError(f"data: no line of text is in the split {name}; add text, or set data.source.val_fraction")
        return ListSplit([(document, f":{number}", text) for document, (number, text) in texts], self._record)

    def _record(self, item: tuple[FileDocument, str, FileDocument | str], epoch: int) -> Record:
        """The record of a document, or of one of its lines."""
        document, ending, content = item
        return Record(f"{document.name}{ending}", {self.holds[0]: content}, read_stamp=document.stamp)

    def _folder(self, root: Path) -> dict[str, list[FileDocument]]:
        """The documents of a folder and its subfolders, by split if all are in folders named like splits."""
        if not root.is_dir():
            what = "is a file; give it as data.path" if root.is_file() else "no such folder; set data.root to one"
            raise UserError(f"data.root={root}: {what}")
        names = (folder + name for folder, _, files in walk_folders(root) for name in files if name[0] != ".")
        texts = sorted(root / name for name in names if name.lower().endswith(SUFFIXES))
        documents = [FileDocument(path, path.relative_to(root).as_posix()) for path in texts if _size(path)]
        self.skipped = [f"{path}: is empty, or a broken link" for path in texts if not _size(path)]
        if not documents:
            raise UserError(f"data.root={root}: has no text in .txt or .md files; set it to another folder")
        folders = [document.name.partition("/") for document in documents]
        stated_splits = [SPLITS.get(folder.lower()) if inside else None for folder, inside, _ in folders]
        if None in stated_splits:
            return {"train": documents}
        if "train" not in stated_splits:
            raise UserError(f"data.root={root}: has folders of splits, but none called train; add it")
        parts: dict[str, list[FileDocument]] = {}
        for split, document in zip(stated_splits, documents, strict=True):
            parts.setdefault(str(split), []).append(document)
        return parts


def _file(split: str, path: Path) -> FileDocument:
    setting = "data.path" if split == "train" else f"data.{split}_path"
    if not path.is_file():
        what = "is a folder; give it as data.root" if path.is_dir() else f"no such file; set {setting} to one"
        raise UserError(f"{setting}={path}: {what}")
    if not _size(path):
        raise UserError(f"{setting}={path}: is empty; give a file of text")
    return FileDocument(path, path.name)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _hold_out(train: list[FileDocument], held: dict[str, float], seed: int) -> dict[str, list[FileDocument]]:
    """Takes parts of train for other splits, by a hash of the name, so that adding files moves few others."""
    if len(train) == 1:
        cuts = [1.0]
        for part in reversed(held.values()):
            cuts.insert(0, cuts[0] - part)
        bounds = zip(("train", *held), pairwise([0.0, *cuts]), strict=True)
        return {split: [replace(train[0], start=start, stop=stop)] for split, (start, stop) in bounds}
    if len(train) <= len(held):
        raise UserError(f"data.root: {len(train)} files are too few for {len(held) + 1} splits; add files")
    places = {document: key("split", seed, document.name) / 2**63 for document in train}
    remaining, parts, bound = sorted(train, key=places.__getitem__), {}, 0.0
    for later_splits, (split, part) in zip(range(len(held), 0, -1), held.items(), strict=True):
        bound += part
        count_below = sum(places[document] < bound for document in remaining)
        count = min(max(1, count_below), len(remaining) - later_splits)  # at least one file per split
        parts[split], remaining = remaining[:count], remaining[count:]
    return {
        split: sorted(files, key=lambda document: document.path)
        for split, files in {"train": remaining, **parts}.items()
    }


class JoinedTexts(Source):
    """Concatenates the texts of several sources in each split.

    Args:
        sources: Sources whose records have a text.
    Raises:
        UserError: There is no source, or the records of one have no text.
    """

    holds = ("text",)
    name = "joined_texts"

    def __init__(self, *, sources: Sequence[Source]) -> None:
        if not sources:
            raise UserError("data.source.sources: is empty; give at least one source")
        for source in sources:
            if "text" not in source.holds:
                raise UserError(f"data.source.sources: {source.name} has no text; remove it")
        self.sources = sources
        self.splits = tuple(name for name in NAMES if any(name in source.splits for source in sources))
        self.notes = [line for source in sources for line in source.notes]
        self.skipped = [line for source in sources for line in source.skipped]

    def open(self, name: str) -> Split:
        names = [source.name for source in self.sources]  # numbered if sources have the same name
        names = [
            source_name if names.count(source_name) == 1 else f"{source_name} {place}"
            for place, source_name in enumerate(names, 1)
        ]
        pairs = zip(names, self.sources, strict=True)
        return _ConcatSplit(
            [(source_name, source.open(name)) for source_name, source in pairs if name in source.splits]
        )


class _ConcatSplit(Split):
    """The records of several splits in sequence, with ids that begin with the source's name."""

    def __init__(self, parts: Sequence[tuple[str, Split]]) -> None:
        self.parts, self.fresh = parts, any(split.fresh for _, split in parts)
        self.begins = [0, *accumulate(len(split) for _, split in parts)]

    def __len__(self) -> int:
        return self.begins[-1]

    def record(self, index: int, epoch: int = 0) -> Record:
        at = bisect(self.begins, index) - 1
        source, split = self.parts[at]
        record = split.record(index - self.begins[at], epoch)
        return Record(f"{source} {record.id}", {"text": record["text"]}, read_stamp=record.read_stamp)
