"""Base of sources of texts: files of each split, or parts of one file."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from vlm.data.hold_out import check_fractions, draw, draw_stratified, held_out
from vlm.data.records import NAMES, Listed, Record, Skipped, Source, Split, error_summary, refuse
from vlm.data.store.places import find_file
from vlm.errors import Share, UserError


class Sample(NamedTuple):
    """A sample of a file: its first line, its values, and its split if the file has one."""

    line: str
    known: Mapping[str, Any]
    split: str | None = None

    @property
    def where(self) -> str:
        """Its position in the file, for messages."""
        return f"line {self.line}" if self.line.isdecimal() else self.line


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
        return Listed(self._samples[name], partial(self._record, name))

    def _record(self, split: str, sample: tuple[str, Mapping[str, Any]], epoch: int) -> Record:
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
        samples = {split: [one for path in own for one in self.samples(path)] for split, own in files.items()}
        for split, own in files.items():
            if not samples[split]:
                raise UserError(f"{own[0]}: has no usable sample{error_summary(self.skipped)}")
            for one in samples[split] if len(files) > 1 and split == "train" else ():
                if one.split in ("val", "test"):
                    refuse(held_out(own[0], one.where, one.split))
        if len(files) == 1:
            parts = self._parts(files["train"][0], samples["train"], {"test": test_fraction, "val": val_fraction}, seed)
        else:
            parts = {split: [(f"{split}:{one.line}", one.known) for one in rows] for split, rows in samples.items()}
        self._take(parts)

    def _take(self, parts: Mapping[str, list[tuple[str, Mapping[str, Any]]]]) -> None:
        """Sets the samples of all splits."""
        self._samples = {name: parts[name] for name in NAMES if parts.get(name)}
        self.splits = tuple(self._samples)

    def _parts(
        self, path: Path, samples: list[Sample], fractions: dict[str, float], seed: int
    ) -> dict[str, list[tuple[str, Mapping[str, Any]]]]:
        """Divides one file into splits."""
        rows = [(one.line, one.known) for one in samples]
        stated = {one.split for one in samples}
        if None not in stated:
            return {name: [row for row, one in zip(rows, samples, strict=True) if one.split == name] for name in NAMES}
        if len(stated) > 1:
            refuse(f"{path}: only some rows have a split; give all or none of them one")
        names = [self._drawn_as(one) for one in samples]
        if all("label" in known for _, known in rows):
            parts = draw_stratified([known["label"] for _, known in rows], names, fractions, seed)
        else:
            parts = draw(names, fractions, seed)
        return {name: [rows[index] for index in sorted(indices)] for name, indices in parts.items()}

    def _drawn_as(self, sample: Sample) -> str:
        """The name that is hashed to hold samples out."""
        return sample.line

    def _skip(self, path: Path, where: str, what: str, kind: str) -> None:
        self.skipped.append(Skipped(f"{path}, {where}: {what}", kind))


def _files(split: str, paths: str | Sequence[str], root: str | None) -> list[Path]:
    setting = "data.path" if split == "train" else f"data.{split}_path"
    folder = None if root is None else Path(root)
    return [find_file(path, folder, setting) for path in ([paths] if isinstance(paths, str) else paths)]
