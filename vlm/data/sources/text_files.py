"""Your own text: a file, or a folder of files."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from vlm.data.records import NAMES, SPLITS, Listed, Record, Source, Split
from vlm.data.store.places import walk
from vlm.data.text.documents import FileDocument
from vlm.errors import Injected, Share, UserError
from vlm.randomness import key

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
        self._parts = parts

    def open(self, name: str) -> Split:
        if "text" not in self.holds:
            return Listed(self._parts[name], _record)
        lines = [(document, *line) for document in self._parts[name] for line in document.texts()]
        if not lines:
            raise UserError(f"data: no line of text is in the split {name}; add text, or set data.source.val_fraction")
        return Listed(lines, _line_record)

    def _folder(self, root: Path) -> dict[str, list[FileDocument]]:
        """The documents of a folder and its subfolders, by split if all are in folders named like splits."""
        if not root.is_dir():
            what = "is a file; give it as data.path" if root.is_file() else "no such folder; set data.root to one"
            raise UserError(f"data.root={root}: {what}")
        texts = _walk(root)
        documents = [FileDocument(path, path.relative_to(root).as_posix()) for path in texts if _size(path)]
        self.skipped = [f"{path}: is empty, or a broken link" for path in texts if not _size(path)]
        if not documents:
            raise UserError(f"data.root={root}: has no text in .txt or .md files; set it to another folder")
        folders = [each.name.partition("/") for each in documents]
        named = [SPLITS.get(folder.lower()) if inside else None for folder, inside, _ in folders]
        if None in named:
            return {"train": documents}
        if "train" not in named:
            raise UserError(f"data.root={root}: has folders of splits, but none called train; add it")
        parts: dict[str, list[FileDocument]] = {}
        for split, each in zip(named, documents, strict=True):
            parts.setdefault(str(split), []).append(each)
        return parts


def _record(document: FileDocument, epoch: int) -> Record:
    return Record(document.name, {"document": document}, read_stamp=document.stamp)


def _line_record(line: tuple[FileDocument, int, str], epoch: int) -> Record:
    document, number, text = line
    return Record(f"{document.name}:{number}", {"text": text}, read_stamp=document.stamp)


def _file(split: str, path: Path) -> FileDocument:
    setting = "data.path" if split == "train" else f"data.{split}_path"
    if not path.is_file():
        what = "is a folder; give it as data.root" if path.is_dir() else f"no such file; set {setting} to one"
        raise UserError(f"{setting}={path}: {what}")
    if not _size(path):
        raise UserError(f"{setting}={path}: is empty; give a file of text")
    return FileDocument(path, path.name)


def _walk(root: Path) -> list[Path]:
    """The text files of a folder and its subfolders, sorted, without hidden ones."""
    names = (folder + name for folder, _, names in walk(root) for name in names if name[0] != ".")
    return sorted(root / name for name in names if name.lower().endswith(SUFFIXES))


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
    places = {each: key("split", seed, each.name) / 2**63 for each in train}
    left, parts, bound = sorted(train, key=places.__getitem__), {}, 0.0
    for rest, (split, part) in zip(range(len(held), 0, -1), held.items(), strict=True):
        bound += part
        drawn = sum(places[each] < bound for each in left)
        count = min(max(1, drawn), len(left) - rest)  # at least one file per split
        parts[split], left = left[:count], left[count:]
    return {split: sorted(files, key=lambda each: each.path) for split, files in {"train": left, **parts}.items()}
